"""Tags of languages, such as ``de``, ``pt-BR`` and ``zho_Hans``."""

from langcodes import Language, standardize_tag
from langcodes.tag_parser import LanguageTagError


def language_of(tag: str) -> str:
    """The language of a tag, as Moses and sacrebleu name it: ``zh`` for ``zho_Hans``, ``zh_CN`` and ``zh-TW``.

    A text that is no language tag is returned as it is.
    """
    try:
        return Language.get(standardize_tag(tag, macro=True)).language or tag
    except LanguageTagError:
        return tag
