#!/usr/bin/env bash
# `pn prepare iwslt14` in the project's environment; pn_fairseq/pipeline/data/recipes/iwslt14.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare iwslt14 "$@"
