#!/usr/bin/env bash
# usage: valkey.sh FOLDER - valkey-server into FOLDER/usr/bin, out of the packages of Debian's backports, which are not
# installed. Needs apt-get, and the libraries of redis-server. Fails where the release has no such package.
set -euo pipefail
folder=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
uri=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
  awk -v release="$codename" '$1 == release {print $2; exit}')
mkdir -p "$work/lists/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri $codename-backports main" >"$work/sources.list"
from=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
  -o APT::Sandbox::User=root)
apt-get "${from[@]}" update
(cd "$work" && apt-get "${from[@]}" download valkey-server valkey-tools)
rm -rf "$folder"
for package in "$work"/*.deb; do dpkg-deb -x "$package" "$folder"; done
"$folder/usr/bin/valkey-server" --version
