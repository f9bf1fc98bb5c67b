"""The documentation site: built strictly, and looked at in a browser over http and as files."""

import functools
import http.server
import inspect
import re
import subprocess
import sys
import threading

import pytest
import yaml

from pn_fairseq import norms

from . import browser as chromium
from .pages import PAGES, ROOT


@pytest.mark.parametrize("name", norms.__all__)
def test_public_name_is_documented(name):
    value = getattr(norms, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """No broken link or anchor, no undocumented public name."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
def test_built_pages(site):
    assert "<math" in (site / "api.html").read_text("utf-8")
    page = (site / "architecture.html").read_text("utf-8")
    assert page.count('src="figures/architecture-') == 3 and "unpkg" not in page
    assert not (site / "tools").exists()
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) >= len(PAGES) - 2  # README.md and CONTRIBUTING.md are no pages
    link = re.compile(r'href="([^"]*(?:glossary\.html|sources/[^"]*\.txt))"')
    for path in pages:
        targets = {path.parent / target for target in link.findall(path.read_text("utf-8"))}
        assert len(targets) >= 2 and all(target.is_file() for target in targets), path
    for source in (site / "sources").rglob("*.txt"):
        page = ROOT / "docs" / source.relative_to(site / "sources").with_suffix("")
        assert source.read_bytes() == page.read_bytes()


def test_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    nav = re.search(r"^nav:\n.*?(?=^\S)", text, re.M | re.S)[0]
    parts = {}
    for part in yaml.safe_load(nav)["nav"]:
        parts |= part
    assert list(parts) == ["Start", "Learn", "How-to", "Reference", "Results", "Internals"]
    reports = (ROOT / "docs/results").glob("*/report.md")
    results = pages_of(parts["Results"])
    assert all(f"results/{file.parent.name}/report.md" in results for file in reports)
    tasks = pages_of(parts["How-to"])
    text = (ROOT / "docs" / tasks.pop(0)).read_text("utf-8")
    assert [page for page in tasks if f"]({page})" not in text] == []


def pages_of(entries: list[dict[str, str]]) -> list[str]:
    return [page for entry in entries for page in entry.values()]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium.PROGRAM is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    one = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def served(site):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.log_message = lambda *arguments: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(params=["http", "file"])
def base(request, site, served):
    return served if request.param == "http" else site.as_uri()


@pytest.mark.slow
def test_home_and_search(browser, base):
    browser.width(1200)
    browser.dark(False)
    browser.open(f"{base}/index.html")
    assert browser.evaluate("document.querySelector('h1').innerText").startswith("pn_fairseq")
    assert browser.evaluate("[...document.images].every(image => image.naturalWidth > 100)")
    snippet = "document.querySelector('article pre')"
    assert browser.evaluate(f"{snippet}.getBoundingClientRect().top") < 800  # on the first screen
    browser.evaluate(
        "document.querySelector('[data-md-toggle=search]').click();"
        "query = document.querySelector('.md-search__input'); query.focus(); query.value = 'mask';"
        "query.dispatchEvent(new Event('input', {bubbles: true}));"
        "query.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
    )
    found = browser.wait(
        "(links => links.length ? links : null)"
        "([...document.querySelectorAll('.md-search-result__link')].map(a => a.href))"
    )
    assert any("own_model.html" in link for link in found), found
    assert all(link.startswith(base) for link in found), found
    # Nothing was loaded from another place.
    loaded = browser.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in loaded if not name.startswith((base, "blob:", "data:"))] == []


@pytest.mark.slow
def test_formulas_have_their_brackets(browser, base):
    browser.width(1200)
    browser.open(f"{base}/norms.html")
    browser.wait(
        "[...document.fonts].some(font => font.family.includes('STIX Two Math') && font.status == "
        "'loaded')"
    )
    row = "document.evaluate(\"//tr[td[1]/code='batch-renorm']\", document).iterateNext()"
    parts = f"[...{row}.querySelectorAll('mo, mfrac')]"
    name = "part.localName + (part.localName == 'mo' ? part.textContent : '')"
    heights = browser.evaluate(
        f"{parts}.map(part => [{name}, part.getBoundingClientRect().height])"
    )
    fraction = next(height for name, height in heights if name == "mfrac")
    brackets = [height for name, height in heights if name in ("mo(", "mo)")]
    assert len(brackets) == 2 and min(brackets) > 0.9 * fraction > 20, heights


@pytest.mark.slow
def test_dark_and_narrow(browser, base):
    for on, scheme in ((True, "slate"), (False, "default")):
        browser.dark(on)
        browser.open(f"{base}/index.html")
        browser.evaluate("localStorage.clear()")  # the choice of an earlier visit
        browser.open(f"{base}/index.html")
        browser.wait(f"document.body.dataset.mdColorScheme == '{scheme}'")
    browser.width(375)
    for page in ("index", "norms", "theory", "compare", "results/index", "api"):
        browser.open(f"{base}/{page}.html")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 376, page
