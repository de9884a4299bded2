#!/bin/sh
# Every relative link of the manual leads to a file that exists and, where it names one, to a heading in it.
set -eu
cd "${0%/*}/.."

# "LINE TARGET" for each inline link outside code.
links_of() {
    awk '
        /^ *```/ { code = !code; next }
        code { next }
        {
            gsub(/`[^`]*`/, "")
            while (match($0, /\]\([^)]*\)/)) {
                print NR, substr($0, RSTART + 2, RLENGTH - 3)
                $0 = substr($0, RSTART + RLENGTH)
            }
        }' "$1"
}

# The anchors that a page's headings get: lower case, punctuation gone, spaces as dashes.
anchors_of() {
    awk '
        /^ *```/ { code = !code; next }
        code || !/^#+ / { next }
        {
            sub(/^#+ +/, "")
            $0 = tolower($0)
            gsub(/[^a-z0-9 _-]/, "")
            gsub(/ /, "-")
            print
        }' "$1"
}

broken_in() {
    links_of "$1" | while read -r line target; do
        case $target in *://* | mailto:*) continue ;; esac
        file=${target%%#*}
        if [ -n "$file" ]; then page=$(dirname "$1")/$file; else page=$1; fi
        if [ ! -e "$page" ]; then
            echo "$1:$line: no such file: $target"
            continue
        fi
        case $target in
            *#*) anchors_of "$page" | grep -qxF -e "${target#*#}" || echo "$1:$line: no such heading: $target" ;;
        esac
    done
}

broken=$(for page in *.md docs/*.md deploy/*.md; do if [ -f "$page" ]; then broken_in "$page"; fi; done)
if [ -n "$broken" ]; then
    printf '%s\n' "$broken" >&2
    exit 1
fi
