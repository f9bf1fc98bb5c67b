#!/usr/bin/env bash
# Four norms on Multi30k, image captions.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce multi30k "$@"
