#!/usr/bin/env bash
# Translate a subset with the model of a run: pn generate.
exec bash "$(dirname "$(readlink -f "$0")")/pn" generate "$@"
