#!/usr/bin/env bash
# Train with the settings of a configuration: pn train.
exec bash "$(dirname "$(readlink -f "$0")")/pn" train "$@"
