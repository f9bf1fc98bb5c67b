#!/usr/bin/env bash
# Every norm on the corpora that a laptop can train, seed by seed, and a report for each corpus.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce compare_norms "$@"
