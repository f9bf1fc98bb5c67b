#!/usr/bin/env bash
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare multi30k_published "$@"
