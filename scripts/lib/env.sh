# The Python environment of this checkout; sourced by the scripts beside it. docs/adr/0005 says why it is built so.
#
#   deadpool_env ROOT    makes ROOT/.venv usable and exports PATH, VIRTUAL_ENV and DEADPOOL_PYTHON
#
# Two layers. The pinned packages of requirements/ (5 GB) are installed once per set of pins and interpreter, below
# DEADPOOL_VENV_CACHE (default ~/.cache/deadpool). ROOT/.venv is a small environment of this checkout alone: it sees the
# packages through one .pth and holds the checkout itself, installed editable with its C++ extensions built in place.
#
# Variables: PYTHON (interpreter to use), DEADPOOL_VENV_CACHE, DEADPOOL_VENV (instead of ROOT/.venv).

_dp_say() { printf 'deadpool: %s\n' "$*" >&2; }
_dp_die() { _dp_say "$*"; exit 2; }

# Why the interpreter $1 cannot be used; nothing when it can.
_dp_python_problem() {
    "$1" - 2>/dev/null <<'PY' || echo "does not run"
import os, sys, sysconfig
if sys.version_info[:2] != (3, 12):
    print(f"is Python {sys.version_info[0]}.{sys.version_info[1]}")
elif not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("has no C headers (on Debian and Ubuntu: the package python3.12-dev)")
else:
    try:
        import ensurepip, venv  # noqa: F401
    except ImportError:
        print("has no venv module (on Debian and Ubuntu: the package python3.12-venv)")
PY
}

# The interpreter that $1 comes from where it belongs to an environment: ours may be about to be made anew, and is
# often the activated one.
_dp_base_python() {
    "$1" -c 'import sys; print(sys._base_executable if sys.prefix != sys.base_prefix else "")' 2>/dev/null | grep . ||
        echo "$1"
}

# Every interpreter worth a look, best first. A python3.12 on PATH may be a version manager's shim that only fails.
_dp_python_candidates() {
    local home=${HOME:-/nonexistent}
    type -aP python3.12 || true
    ls -1d "${PYENV_ROOT:-$home/.pyenv}"/versions/3.12*/bin/python 2>/dev/null | sort -rV || true
    ls -1d "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$home/.local/share}/uv/python}"/cpython-3.12*/bin/python3.12 \
        2>/dev/null | sort -rV || true
    type -aP python3 || true
}

_dp_find_python() {
    local candidate problem nearly=""
    if [ -n "${PYTHON:-}" ]; then
        problem=$(_dp_python_problem "$PYTHON")
        [ -z "$problem" ] || _dp_die "PYTHON=$PYTHON $problem; Python 3.12 is needed"
        _dp_base_python "$(type -P "$PYTHON")"
        return
    fi
    while IFS= read -r candidate; do
        problem=$(_dp_python_problem "$candidate")
        if [ -z "$problem" ]; then
            _dp_base_python "$candidate"
            return
        fi
        case $problem in has*) nearly="; $candidate $problem" ;; esac
    done < <(_dp_python_candidates)
    _dp_die "no usable Python 3.12 on PATH or among pyenv's and uv's versions$nearly; install one or set PYTHON="
}

# _dp_quietly LOG WHAT COMMAND...: output goes to LOG; on failure its last lines are shown, without pip's chatter.
_dp_quietly() {
    local log=$1 what=$2 started=$SECONDS
    shift 2
    _dp_say "$what ..."
    if "$@" >"$log" 2>&1; then
        _dp_say "$what: done in $((SECONDS - started)) s"
    else
        grep -vE "^WARNING: (Location|Skipping|Running pip)|^\[notice\]|^ *$" "$log" | tail -n 15 >&2 || true
        _dp_die "$what failed; everything it said is in $log"
    fi
}

_dp_pip() {
    local python=$1
    shift
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PYTHONWARNINGS=ignore \
        "$python" -m pip "$@"
}

_dp_install_packages() {
    local python=$1 venv=$2 root=$3
    rm -rf "$venv" && "$python" -m venv "$venv" &&
        _dp_pip "$venv/bin/python" install --quiet --no-deps \
            -r "$root/requirements/runtime.txt" -r "$root/requirements/build.txt" -r "$root/requirements/dev.txt" &&
        _dp_pip "$venv/bin/python" check
}

# The shared layer. Complete when its stamp exists; a lock keeps two checkouts from filling it at once.
_dp_package_layer() {
    local python=$1 packages=$2 root=$3 lock
    mkdir -p "$(dirname "$packages")" || _dp_die "cannot create $(dirname "$packages"); set DEADPOOL_VENV_CACHE="
    exec {lock}>"$packages.lock"
    if command -v flock >/dev/null && ! flock -n "$lock"; then
        _dp_say "another checkout is installing the same packages; waiting for it"
        flock -w 1800 "$lock" || _dp_die "waited 30 minutes for $packages.lock; is an installation stuck?"
    fi
    if [ ! -e "$packages/.complete" ] || ! "$packages/bin/python" -c "" 2>/dev/null; then
        _dp_quietly "$packages.log" "installing the pinned packages into $packages (once; some minutes, 5 GB)" \
            _dp_install_packages "$python" "$packages" "$root"
        touch "$packages/.complete"
    fi
    exec {lock}>&-
}

# The checkout's own layer: an empty environment that sees the packages, and their commands run by its interpreter.
_dp_make_thin_layer() {
    local python=$1 venv=$2 packages=$3 site shared file name
    rm -rf "$venv"
    "$python" -m venv --without-pip "$venv" || _dp_die "cannot create $venv"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    shared=$("$packages/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # addsitedir and not the bare path: .pth files of installed packages count too.
    printf "import site; site.addsitedir(r'%s')\n" "$shared" >"$site/deadpool-packages.pth"
    for file in "$packages"/bin/*; do
        name=$(basename "$file")
        case $name in python* | pip* | [Aa]ctivate*) continue ;; esac
        if [ "$(head -c 2 "$file" | tr -d '\0')" = "#!" ]; then
            sed "1s|^#!.*|#!$venv/bin/python|" "$file" >"$venv/bin/$name" && chmod +x "$venv/bin/$name"
        else
            ln -s "$file" "$venv/bin/$name"
        fi
    done
}

# Whether an environment somebody made by hand holds every pinned version.
_dp_holds_pins() {
    "$1/bin/python" - "$2" 2>/dev/null <<'PY'
import pathlib, re, sys
from importlib import metadata
if sys.version_info[:2] != (3, 12):
    sys.exit(1)
for page in pathlib.Path(sys.argv[1], "requirements").glob("*.txt"):
    for name, version in re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)$", page.read_text(), re.MULTILINE):
        if metadata.version(name) != version:
            sys.exit(1)
PY
}

_dp_source_hash() {
    local root=$1
    # Of pyproject.toml only what comes before the tools' settings: the project, its entry point, its packages.
    (cd "$root" && {
        { find csrc -type f 2>/dev/null | LC_ALL=C sort; ls setup.py 2>/dev/null || true; } | xargs -r sha256sum
        sed '/^\[tool\.pytest/,$d' pyproject.toml
    } | sha256sum | cut -c1-16)
}

# The extensions that the last build left, for noticing that somebody cleaned the tree.
_dp_built_extensions() { (cd "$1" && find deadpool_ext megatron -name '*.so' | LC_ALL=C sort); }

deadpool_env() {
    local root=$1 python key packages venv stamp wanted
    local cache=${DEADPOOL_VENV_CACHE:-${XDG_CACHE_HOME:-${HOME:-$root}/.cache}/deadpool}
    venv=${DEADPOOL_VENV:-$root/.venv}
    python=$(_dp_find_python) || exit 2
    key=$({
        cat "$root"/requirements/*.txt
        "$python" -c 'import platform, sys; print(platform.python_version(), sys.base_prefix, platform.machine())'
    } | sha256sum | cut -c1-16)
    packages=$cache/venv-$key
    stamp=$venv/.deadpool-environment

    if [ -e "$venv" ] && [ ! -e "$stamp" ]; then
        _dp_holds_pins "$venv" "$root" ||
            _dp_die "$venv is not ours and lacks some version pinned in requirements/; remove it or set DEADPOOL_VENV="
        _dp_say "using $venv as it is: it holds every pinned version"
        printf 'own %s %s\n' "$key" "$venv" >"$stamp"
    fi
    case $(cat "$stamp" 2>/dev/null) in
        "own $key $venv") ;;
        "own "*)
            _dp_holds_pins "$venv" "$root" ||
                _dp_die "$venv was made by hand and lacks some version now pinned in requirements/; remove it"
            printf 'own %s %s\n' "$key" "$venv" >"$stamp"
            ;;
        *)
            _dp_package_layer "$python" "$packages" "$root"
            wanted="layer $key $venv $packages"
            if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! "$venv/bin/python" -c "" 2>/dev/null; then
                _dp_make_thin_layer "$python" "$venv" "$packages"
                echo "$wanted" >"$stamp"
            fi
            ;;
    esac

    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH DEADPOOL_PYTHON=$venv/bin/python
    unset PYTHONHOME
    wanted="$root $key $(_dp_source_hash "$root")"
    if [ "$(cat "$venv/.deadpool-extension" 2>/dev/null)" != "$wanted
$(_dp_built_extensions "$root")" ]; then
        command -v c++ >/dev/null || command -v g++ >/dev/null ||
            _dp_die "no C++ compiler (c++ or g++) on PATH; on Debian and Ubuntu: the package g++"
        _dp_quietly "$venv/build.log" "building the C++ extensions in place" \
            _dp_pip "$DEADPOOL_PYTHON" install --quiet --no-deps --no-build-isolation --editable "$root"
        printf '%s\n%s\n' "$wanted" "$(_dp_built_extensions "$root")" >"$venv/.deadpool-extension"
    fi
}
