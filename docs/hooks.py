"""What mkdocs needs besides mkdocs.yml: formulas as MathML, links of every page, and the
docstrings' reST as Markdown.

Formulas are written as on GitHub, in code blocks of the language ``math`` and inline as $`x`$.
MathML needs no script in the browser, and stylesheets/ has a font for it. Every page links the
glossary and its own source, which is copied into the site.
"""

import html
import logging
import re
import sys
from pathlib import Path

from griffe import Docstring, Extension
from latex2mathml.converter import convert

import pn_fairseq.norms


def mathml(source: str, display: str = "inline") -> str:
    rows = re.sub(r"\s+", " ", source).strip()
    return convert(
        rf"\begin{{align*}}{rows}\end{{align*}}" if "&" in rows else rows, display=display
    )


def math_block(source, language, css_class, options, md, **kwargs) -> str:
    return f'<div class="math">{mathml(source, "block")}</div>'


def math_inline(source, language, css_class, md) -> str:
    return mathml(html.unescape(source))


def on_config(config):
    fence = {"name": "math", "class": "math", "format": math_block}
    config.mdx_configs["pymdownx.superfences"]["custom_fences"].append(fence)
    config.mdx_configs["pymdownx.inlinehilite"] = {
        "custom_inline": [{"name": "math", "class": "math", "format": math_inline}]
    }
    return config


def on_page_markdown(text, page, config, files) -> str:
    return re.sub(r"\$`([^`]+)`\$", r"`#!math \1`", text)


def on_page_content(content, page, config, files) -> str:
    source = f"{_up(page)}sources/{page.file.src_uri}.txt"
    links = [f'<a href="{source}">Source of this page</a>']
    if page.file.src_uri != "glossary.md":
        links.insert(0, f'<a href="{_up(page)}glossary.html">Glossary</a>')
    return f'{content}\n<p class="page-links">{" · ".join(links)}</p>'


def _up(page) -> str:
    """The way from a page to the root of the site."""
    return "../" * page.file.src_uri.count("/")


def on_post_page(output, page, config) -> str:
    copy = Path(config.site_dir, "sources", f"{page.file.src_uri}.txt")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(page.file.content_string, "utf-8")
    return output


def _block(match: re.Match) -> str:
    indent, source = match["indent"], f"{match['line']}\n{match['rest']}"
    lines = [f"{indent}{line.strip()}" for line in source.splitlines() if line.strip()]
    return "\n".join([f"{indent}```math", *lines, f"{indent}```", ""])


def _reference(match: re.Match) -> str:
    target = match["target"].lstrip("~.")
    name = target.split(".")[-1]
    if name not in pn_fairseq.norms.__all__:
        return f"`{target}`"
    own = f"pn_fairseq.norms.{name}"
    # a class can have the name of its module
    return f"[`{name}`][{f'{own}.{name}' if own in sys.modules else own}]"


def markdown(docstring: str) -> str:
    """The docstring with the roles and directives of reST that this project uses in Markdown."""
    text = re.sub(
        r"^(?P<indent> *)\.\. math::(?P<line>.*)\n(?P<rest>(?:(?P=indent) +\S.*\n?|\s*\n)*)",
        _block,
        docstring,
        flags=re.M,
    )
    text = re.sub(r":math:`([^`]+)`", r"`#!math \1`", text)
    text = re.sub(r":(?:class|func|meth|mod|data|attr):`(?P<target>[^`]+)`", _reference, text)
    return re.sub(r"::$", ":", text, flags=re.M)


def _comment_before(attribute) -> str:
    """The ``#:`` lines directly before an attribute."""
    lines = attribute.filepath.read_text("utf-8").splitlines()[: attribute.lineno - 1]
    start = len(lines)
    while start and lines[start - 1].lstrip().startswith("#:"):
        start -= 1
    return "\n".join(line.strip().removeprefix("#:").strip() for line in lines[start:])


class Docstrings(Extension):
    """griffe calls these methods for what it reads."""

    def on_object(self, *, obj, **kwargs):  # called after on_package
        if (
            obj.is_attribute
            and obj.docstring is None
            and obj.lineno
            and (comment := _comment_before(obj))
        ):
            obj.docstring = Docstring(comment, parent=obj)
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_package(self, *, pkg, **kwargs):
        norms = pkg["norms"]
        for name in norms.exports or ():
            target = norms[str(name)]
            if target.is_module:  # a class with the name of its module
                target = target[str(name)]
            target = target.final_target if target.is_alias else target
            if target.docstring is None and not (target.is_attribute and _comment_before(target)):
                # A warning, which ends a strict build.
                logging.getLogger("mkdocs.plugins.pn_fairseq").warning(
                    "pn_fairseq.norms.%s has no docstring", name
                )
