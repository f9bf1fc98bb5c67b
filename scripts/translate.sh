#!/usr/bin/env bash
# Translate plain text with the model of a run: pn translate (pn_fairseq/pipeline/translate.py).
exec bash "$(dirname "$(readlink -f "$0")")/pn" translate "$@"
