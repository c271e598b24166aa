#!/usr/bin/env bash
# Why a checkout cannot be used where it lies, in one line; nothing where it can. `make` asks before it does anything.
cd "$(dirname "$0")/../.." || exit
here=$(pwd -P && echo .)
here=${here%$'\n.'}
refused=$'[[:cntrl:]:"$`\\\\{}]'

if [[ $here =~ $refused ]]; then
    printf 'the path of this checkout holds %q, which programs here cannot take; move it to another one\n' "${BASH_REMATCH[0]}"
elif [ ! -w . ]; then
    echo "$here cannot be written; clone it to a folder that can"
else
    now=$(cd .venv 2>/dev/null && pwd -P)
    for stamp in .venv/ready-*; do
        made=$(cat "$stamp" 2>/dev/null)
        [ -z "$made" ] || [ "$made" = "$now" ] || {
            echo ".venv was set up as $made and is $now now, where its programs do not work; run: rm -r .venv && make setup"
            break
        }
    done
fi
