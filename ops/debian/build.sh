#!/bin/bash
# Builds tensord_VERSION_amd64.deb: the daemon and tensorctl in a virtual environment of its own, /opt/tensord, with all
# that they need, and the service. Debian 12 has no numpy 2 and no msgspec, which tensord needs.
#
# usage: build.sh OUT    OUT is a folder. Runs as any user; the distribution's python3 makes the environment.
set -euo pipefail
umask 022
out=$(realpath "$1")
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
checkout=$(realpath "$here/../..")
python=/usr/bin/python3
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
package=$root/package environment=$root/package/opt/tensord

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$checkout/tensord/__init__.py")
version=$(sed 's/\.\(dev\)/~\1/; s/\([0-9]\)\(a\|b\|rc\)/\1~\2/' <<<"$version")

# ---- the environment, without pip and without what only a shell's user needs
"$python" -m venv "$environment"
"$environment/bin/python" -m pip --disable-pip-version-check --no-input -q install --no-compile \
  -c "$checkout/constraints.txt" "$checkout[amd,blake3,nvidia]"
"$environment/bin/python" -m pip -q --disable-pip-version-check uninstall -y setuptools pip 2>/dev/null
find "$environment/bin" -type f ! -name tensord ! -name tensorctl -delete
find "$environment" -name direct_url.json -delete
sed -i '1s|.*|#!/opt/tensord/bin/python|' "$environment"/bin/{tensord,tensorctl}
sed -i '/^command = /d' "$environment/pyvenv.cfg"
find "$environment" -name __pycache__ -prune -exec rm -r {} +
# The daemon may not write here. Some packages carry files for other versions of Python, which do not compile.
"$python" -m compileall -q -s "$package" -p / --invalidation-mode unchecked-hash "$environment/lib" >/dev/null || true

# ---- the service and the commands
units=$package/usr/lib/systemd
install -D -m 644 -t "$units/system" "$checkout"/systemd/*.{service,socket,timer}
install -D -m 644 -t "$units/user" "$checkout"/systemd/user/*.{service,socket,timer}
sed -i '/^# pipx/d; s|^ExecStart=.*|ExecStart=/usr/bin/tensord|; s|^ExecReload=.*|ExecReload=/usr/bin/tensorctl reload|' "$units/user/tensord.service"
install -D -m 644 -t "$package/usr/lib/sysusers.d" "$checkout/systemd/sysusers.d/tensord.conf"
install -D -m 644 -t "$package/usr/lib/tmpfiles.d" "$checkout/systemd/tmpfiles.d/tensord.conf"
install -D -m 644 -t "$package/etc/tensord" "$checkout/systemd/tensord.toml"
install -d "$package/usr/bin"
ln -s ../../opt/tensord/bin/tensord ../../opt/tensord/bin/tensorctl "$package/usr/bin"
install -D -m 644 "$here/copyright" "$package/usr/share/doc/tensord/copyright"

# ---- the package
install -d "$package/DEBIAN"
install -m 755 -t "$package/DEBIAN" "$here"/{postinst,prerm,postrm}
echo /etc/tensord/tensord.toml >"$package/DEBIAN/conffiles"
read -r this next < <("$python" -c 'import sys; a, b = sys.version_info[:2]; print(f"{a}.{b} {a}.{b + 1}")')
sed -e "s/@VERSION@/$version/; s/@PYTHON@/$this/; s/@NEXT@/$next/" \
  -e "s/@SIZE@/$(du -sk --apparent-size "$package" | cut -f1)/" "$here/control" >"$package/DEBIAN/control"
mkdir -p "$out"
dpkg-deb --root-owner-group -Zxz -z2 --build "$package" "$out/tensord_${version}_amd64.deb"
