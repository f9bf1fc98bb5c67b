"""Tags of languages, such as ``de``, ``pt-BR`` and ``zho_Hans``."""

import importlib.util

from langcodes import Language, standardize_tag, tag_is_valid
from langcodes.tag_parser import LanguageTagError

from pn_fairseq.common.command import UserError


def language_of(tag: str) -> str:
    """The language of a tag, as Moses and sacrebleu name it: ``zh`` for ``zho_Hans``, ``zh_CN`` and
    ``zh-TW``.

    A text that is not a language tag is returned unchanged.
    """
    try:
        return Language.get(standardize_tag(tag, macro=True)).language or tag
    except LanguageTagError:
        return tag


def check_tag(tag: str, option: str) -> None:
    """Refuse a text that is not the tag of a language."""
    if not tag_is_valid(tag):
        raise UserError(f"{option} {tag} is the tag of no language; tags are en, pt-BR, zho_Hans")


#: Language -> the package that sacrebleu needs to tokenize it, and the module that shows whether it
#: is installed.
_PACKAGES = {"ja": ("sacrebleu[ja]", "MeCab"), "ko": ("sacrebleu[ko]", "mecab_ko")}


def missing_package(tag: str) -> str | None:
    """What ``pip`` must install before sacrebleu can tokenize the language; None if nothing."""
    package, module = _PACKAGES.get(language_of(tag), (None, "sys"))
    return None if importlib.util.find_spec(module) else package
