"""Small packages made on the fly, and an index of them, as pip reads one: for tests of environments."""

import hashlib
import stat
import tarfile
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from types import MappingProxyType


class PackageIndex:
    """A folder in the layout of PEP 503: ``simple/NAME/index.html`` and the files beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # who builds is none of us

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def wheel(
        self,
        name: str,
        version: str,
        files: Mapping[str, str],
        requires: tuple[str, ...] = (),
        tag: str = "py3-none-any",
        links: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``links``: what a zip says to be symbolic links, and where to."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        whole = dict(files) | {
            f"{info}/METADATA": "\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), ""]),
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }
        whole[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*whole, *links, f"{info}/RECORD"])
        data = BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, text in whole.items():
                archive.writestr(path, text)
            for path, target in links.items():
                member = zipfile.ZipInfo(path)
                member.create_system, member.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
                archive.writestr(member, target)
        self._add(name, f"{name.replace('-', '_')}-{version}-{tag}.whl", data.getvalue())

    def sources(self, name: str, version: str, setup: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """An sdist, whose setup.py has this text."""
        data = BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as archive:
            info = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            for path, text in ({"setup.py": setup, "PKG-INFO": info} | dict(more)).items():
                member = tarfile.TarInfo(f"{name}-{version}/{path}")
                member.size = len(text.encode())
                archive.addfile(member, BytesIO(text.encode()))
        self._add(name, f"{name}-{version}.tar.gz", data.getvalue())

    def _add(self, name: str, file: str, data: bytes) -> None:
        folder = self.folder / name.lower().replace("_", "-")
        folder.mkdir(exist_ok=True)
        (folder / file).write_bytes(data)
        files = sorted(path for path in folder.iterdir() if path.name != "index.html")
        links = [
            f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
            for path in files
        ]
        (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "<br>".join(links) + "</body></html>")
