#!/usr/bin/env bash
# Translate text from stdin or a file with the model of a run: pn translate.
exec bash "$(dirname "$(readlink -f "$0")")/pn" translate "$@"
