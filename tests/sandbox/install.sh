#!/usr/bin/env bash
# Debian packages the sandbox tests need: sshd, lxc, iproute2, tmux, chromium. Elsewhere: says what is skipped.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "sandbox: not root on Debian, the tests over real SSH and LXC, and in a real browser, are skipped"
  exit 0
fi
missing=()
for pair in tmux:tmux lxc-start:lxc sshd:openssh-server ip:iproute2 chromium:chromium; do
  PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "sandbox: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
