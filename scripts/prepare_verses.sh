#!/usr/bin/env bash
# `pn prepare verses` in the project's environment; pn_fairseq/pipeline/data/recipes/verses.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare verses "$@"
