#!/usr/bin/env bash
# Any configuration and prepared data, for a list of norms and seeds: pn reproduce CONFIG --data DIR.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce "$@"
