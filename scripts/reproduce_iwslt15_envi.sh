#!/usr/bin/env bash
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce iwslt15_envi "$@"
