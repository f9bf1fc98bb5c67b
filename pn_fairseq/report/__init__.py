"""The report over training runs: what ``pn report`` writes.

``runs`` reads folders of runs, ``systems`` groups them (runs that differ by nothing but their seed are one system),
``significance`` and ``intervals`` compare systems, ``curves`` draws, ``tables`` (for language models also
``perplexity``) collects what the template ``report.md.j2`` shows, and ``markdown`` renders it.
"""
