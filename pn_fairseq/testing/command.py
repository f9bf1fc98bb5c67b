"""``pn test-norms``: the shared test suite on registered norms and on norms in your own files."""

import importlib.util
import os
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, split_paths


class _Chosen:
    """A pytest plugin that passes the suite the norms to test, and the files to load in the
    processes that it starts.
    """

    def __init__(self, names: list[str], modules: list[str]):
        self.names = names
        self.modules = modules

    def pytest_configure(self, config) -> None:
        config.option.norm_names = self.names
        config.option.norm_modules = self.modules
        config.addinivalue_line("markers", "slow: left out by -m 'not slow'")

    def pytest_collection_modifyitems(self, config, items) -> None:
        """Leave out the tests for norms with state if no norm has any."""
        items[:] = [item for item in items if not _has_no_norm(item)]

    def pytest_collection_finish(self, session) -> None:
        print(f"{len(session.items)} tests of {', '.join(self.names)}", flush=True)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """Write a line for each failure; pytest cuts its own lines at the terminal's width."""
        stats = terminalreporter.stats
        for report in [*stats.get("failed", ()), *stats.get("error", ())]:
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                name = report.nodeid.rpartition("::")[2]
                terminalreporter.write_line(f"FAILED {name}: {crash.message.splitlines()[0]}")


def _has_no_norm(item) -> bool:
    """Whether pytest skips a test because its fixture has no values."""
    return any("empty param" in str(mark) for mark in item.iter_markers("skip"))


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="pn test-norms",
        description="Check the rules that every norm must keep: padding, ranks, activation "
        "checkpointing, gradient accumulation, faults, precision, saving, recalibration, "
        "averaging, folding, diagnostics, compilation.",
        epilog="Arguments after -- are passed to pytest, for example: -- -x -k padding",
    )
    about_files = "Python files that register norms (docs/adding_a_norm.md)"
    parser.add_argument("--norm-module", metavar="FILE[,FILE]", help=about_files)
    about_names = "norms to test (default: the norms of the files; without files, all norms)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=about_names)
    argv = argv or []
    if "--" in argv:
        end = argv.index("--")
    else:
        end = len(argv)
    args = parser.parse_args(argv[:end])
    for_pytest = argv[end + 1 :]
    if importlib.util.find_spec("pytest") is None:
        raise UserError("pytest is not installed; install it with: pip install pytest")
    import pytest

    pytest.register_assert_rewrite("pn_fairseq.testing.helpers")
    from pn_fairseq.norms import NORMS, load_norms
    from pn_fairseq.norms.registry import build_norm
    from pn_fairseq.testing import helpers

    known = set(NORMS)
    modules = []
    if args.norm_module is not None:
        modules = [os.path.abspath(path) for path in split_paths(args.norm_module)]
    try:
        for path in modules:
            load_norms(path)
        of_files = [name for name in NORMS if name not in known]
        if modules and not (args.names or of_files):
            raise UserError(
                f"{args.norm_module} registers no norm; decorate its class with "
                "pn_fairseq.norms.register_norm"
            )
        names = args.names or of_files or list(NORMS)
        for name in names:
            if name.endswith(".py"):
                raise UserError(f"'{name}' is no norm, did you mean '--norm-module {name}'?")
            build_norm(name, 8)
    except ValueError as error:
        raise UserError(str(error)) from error

    folder = Path(__file__).parent
    # Ignore the configuration of the current folder, so that the suite is the same everywhere.
    options = f"-q -r N -p no:cacheprovider -c {os.devnull}".split()
    options += ["--rootdir", str(folder)]
    suite = sorted(str(file) for file in folder.glob("test_*.py"))
    arguments = [*options, *for_pytest, *suite]
    code = pytest.main(arguments, plugins=[_Chosen(names, modules), helpers])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return int(code)
