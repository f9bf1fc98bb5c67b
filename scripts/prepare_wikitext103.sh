#!/usr/bin/env bash
# `pn prepare wikitext103` in the project's environment; pn_fairseq/pipeline/data/recipes/wikitext103.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare wikitext103 "$@"
