"""Fields of a dataclass that are flags of a model."""

import argparse
from dataclasses import field


def checked(check, note: str = ""):
    """A kind of flag: the text, unless ``check`` raises ValueError, whose message is shown with ``note``.

    Called with the name of the value in the help; returns argparse's arguments.
    """

    def parse(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}{note}") from None
        return text

    return lambda metavar: {"type": parse, "metavar": metavar}


def flag(help: str, argument: dict, default=None):
    """A field with a flag of its name; ``argument`` is for argparse."""
    return field(default=default, metadata={"help": help, **argument})
