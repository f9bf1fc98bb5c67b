"""The report over training runs: what ``pn report`` writes.

``runs`` reads folders of runs, ``systems`` groups them (runs that differ by nothing but their seed are one system),
``significance`` compares systems, ``curves`` draws, ``tables`` collects what the
template ``report.md.j2`` shows, and ``markdown`` renders it.
"""
