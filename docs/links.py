"""Finds broken links: python docs/links.py [FOLDER]

Without FOLDER, the script checks the relative links of every .md file in the repository: the file and the heading must
exist. If FOLDER contains the built pages, the script checks the links between these pages: the page and the anchor must
exist. Links to other sites are not checked. The script prints each broken link. If there is a broken link, the exit
status is 1.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors and the link targets of an HTML page."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects the anchors and links in the attributes of an element."""
        for name, value in attrs:
            if name == 'id' or (tag, name) == ('a', 'name'):
                self.anchors.add(value)
            elif name in ('href', 'src') and value:
                self.links.append(value)


class Markdown:
    """The link targets of a Markdown file, and the anchors that GitHub makes from the headings of the file."""

    def __init__(self, path: Path):
        text = re.sub(r'^(```+).*?^\1', '', path.read_text(encoding='utf-8'), flags=re.DOTALL | re.MULTILINE)
        headings = re.findall(r'^#+ +(.+?) *$', text, flags=re.MULTILINE)
        self.anchors = {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}
        # Code contains no links, but the text of a link may be code.
        self.links = re.findall(r'\]\(<?([^)\s>]+)>?\)', re.sub(r'`[^`\n]*`', 'code', text))


def broken_links(root: Path, paths: Iterable[Path]) -> Iterator[str]:
    """Yields a message for each broken link in the files at `paths`.

    A link is broken if its file does not exist below `root`, or if the file does not have the anchor.
    """
    files = {path.resolve(): (Page if path.suffix == '.html' else Markdown)(path) for path in paths}
    for path, file in files.items():
        for link in file.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or not target.is_relative_to(root.resolve()):
                yield f'{path.relative_to(root.resolve())}: {link}: the file does not exist'
            elif target in files and parts.fragment and unquote(parts.fragment) not in files[target].anchors:
                yield f'{path.relative_to(root.resolve())}: {link}: the file does not have this anchor'


def main(arguments: list[str]) -> int:
    """Prints the broken links. Returns the exit status, which is 1 if there are broken links."""
    if arguments:
        root = Path(arguments[0])
        paths = list(root.rglob('*.html'))
    else:
        root = Path(__file__).parents[1]
        listing = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', '*.md'],
                               cwd=root, capture_output=True, text=True, check=True).stdout
        paths = [root / name for name in listing.split('\0') if name and (root / name).exists()]
    broken = list(broken_links(root, paths))
    print(*broken, f'{len(paths)} files, {len(broken)} broken links', sep='\n')
    return 1 if broken or not paths else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
