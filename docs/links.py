"""Links that lead nowhere: python docs/links.py [FOLDER]

Without a folder, the relative links of every .md file of the repository: the file must be there, and have the heading.
With the folder of built pages, their links to each other: the page must be there, and have the anchor. Links to other
sites are not followed. Prints each broken link, and exits with 1 if there is one.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """An HTML page's anchors, and where its links lead."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes what an element's attributes say."""
        for name, value in attrs:
            if name == 'id' or (tag, name) == ('a', 'name'):
                self.anchors.add(value)
            elif name in ('href', 'src') and value:
                self.links.append(value)


class Markdown:
    """A Markdown file's anchors, which GitHub makes of its headings, and where its links lead."""

    def __init__(self, path: Path):
        text = re.sub(r'^(```+).*?^\1', '', path.read_text(encoding='utf-8'), flags=re.DOTALL | re.MULTILINE)
        headings = re.findall(r'^#+ +(.+?) *$', text, flags=re.MULTILINE)
        self.anchors = {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}
        # Code is no link, but the text of a link may be code.
        self.links = re.findall(r'\]\(<?([^)\s>]+)>?\)', re.sub(r'`[^`\n]*`', 'code', text))


def broken_links(root: Path, paths: Iterable[Path]) -> Iterator[str]:
    """A line for each link of the files at `paths` that leads to no file below `root`, or to no anchor in it."""
    files = {path.resolve(): (Page if path.suffix == '.html' else Markdown)(path) for path in paths}
    for path, file in files.items():
        for link in file.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or not target.is_relative_to(root.resolve()):
                yield f'{path.relative_to(root.resolve())}: {link}: there is no such file'
            elif target in files and parts.fragment and unquote(parts.fragment) not in files[target].anchors:
                yield f'{path.relative_to(root.resolve())}: {link}: the file has no such anchor'


def main(arguments: list[str]) -> int:
    """The exit status: 1 if a link is broken."""
    if arguments:
        root = Path(arguments[0])
        paths = list(root.rglob('*.html'))
    else:
        root = Path(__file__).parents[1]
        found = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', '*.md'],
                               cwd=root, capture_output=True, text=True, check=True).stdout
        paths = [root / name for name in found.split('\0') if name and (root / name).exists()]
    broken = list(broken_links(root, paths))
    print(*broken, f'{len(paths)} files, {len(broken)} broken links', sep='\n')
    return 1 if broken or not paths else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
