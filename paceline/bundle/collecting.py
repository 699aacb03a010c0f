"""Makes a bundle from a spec on the submitter's machine: chooses, digests and refuses files. A path that does not exist
here is sent unchanged; the services resolve it (a function's file in a worker's image, or data on its disk)."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from paceline.bundle.imports import imports_of, literal_files, undeclared
from paceline.bundle.manifest import (
    BundledFile,
    Kind,
    Manifest,
    data_names,
    is_path,
    path_of_data,
    path_of_data_folder,
    path_of_file,
    path_of_folder,
    path_of_prepared,
    split_glob,
)
from paceline.errors import SpecError
from paceline.host.regular_file import open_named
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, file_of

MB = 1 << 20
NONE_PREPARED: Mapping[str, Sequence[Path]] = MappingProxyType({})


@dataclass(frozen=True)
class Bundle:
    manifest: Manifest
    sources: dict[str, Path]
    """Maps each SHA-256 in the manifest to the path of a file with this digest."""
    warnings: tuple[str, ...] = ()
    """Sentences about files that the run may need and the bundle lacks."""


@dataclass
class _Found:
    """Files of a spec by path in the bundle, each with the field of the spec that named the file."""

    spec: RunSpec
    files: dict[str, tuple[Kind, str, Path]] = field(default_factory=dict)
    size: int = 0

    def add(self, kind: Kind, name: str, bundled: str, path: Path) -> None:
        """Check and add a file. A path that was added before keeps its kind, so no file is both code and data. Raises
        SpecError."""
        if bundled not in self.files:
            size = _checked_size(name, path)
            self.files[bundled] = (kind, name, path)
            self.size += size
            if self.size > self.spec.bundle.max_mb * MB:
                self._refuse(kind, name, path, size)

    def _refuse(self, kind: Kind, name: str, path: Path, size: int) -> None:
        remedy = (
            "give the data as a URL that the services can read (s3://…, gs://…, or file:///… where all services see "
            "the path), or raise bundle.max_mb"
            if kind == "data"
            else "name fewer files, or raise bundle.max_mb"
        )
        raise SpecError(
            f"{name}: with {str(path)!r} ({size / MB:.1f} MB) the run's files are {self.size / MB:.1f} MB, more than "
            f"bundle.max_mb {self.spec.bundle.max_mb}; {remedy}"
        )


def collect(
    spec: RunSpec, data_of: Manifest | None = None, prepared: Mapping[str, Sequence[Path]] = NONE_PREPARED
) -> Bundle:
    """Return the bundle of a spec. The bundle is empty if this machine has none of the files that the spec names. With
    `data_of`, an earlier bundle's manifest, the data files are the earlier ones, and none is read. `prepared` replaces the data sets of a field.
    Raises SpecError, which names the field and the file, for a link that leaves its folder, for a device, for a file
    that is unreadable or changes meanwhile, and for files that are larger together than bundle.max_mb."""
    found = _Found(spec)
    kept = data_of.subset("data").files if data_of is not None else ()
    warnings = _add_code(found)
    _add_included(found)
    if data_of is None:
        _add_data(found, prepared)
    files, sources = list(kept), dict[str, Path]()
    taken = {file.path for file in kept}
    for bundled, (kind, name, path) in found.files.items():
        if bundled not in taken:
            file = _digested(bundled, kind, name, path)
            files.append(file)
            sources.setdefault(file.sha256, path)
    return Bundle(Manifest.of(files), sources, tuple(warnings))


def _add_code(found: _Found) -> list[str]:
    """Add the run's files of code and the modules beside these files that they import; return warnings."""
    spec, others, warnings = found.spec, dict[str, Path](), []
    for name, code in code_paths(spec).items():
        file = file_of(code)
        path = Path(file)
        if not path.is_absolute():
            continue
        if not path.exists():
            workers = "reward" if name.startswith("rewards") else "environment"
            warnings.append(
                f"{name}: no file {file!r} is on this machine, so none travels with the run; correct the path, unless the "
                f"{workers} workers' hosts have it there"
            )
            continue
        found.add("code", name, path_of_file(spec.folder, file), path)
        imports = imports_of(path)
        base = path_of_folder(spec.folder, str(path.parent))
        for needed in sorted(imports.files - {path}):
            inside = _inside(name, needed, path.parent)
            found.add("code", name, f"{base}/{inside}", needed)
        others |= imports.others
        for source in sorted(imports.files):
            warnings += _not_included(found, source) if source.suffix == ".py" else []
    for module in undeclared(others, spec.bundle.requirements):
        warnings.append(
            f"{others[module].name} imports {module!r}, which is neither beside it nor a dependency of Paceline; name it in "
            "bundle.requirements, so that a worker that lacks the module reports this before the first group"
        )
    return list(dict.fromkeys(warnings))


def _not_included(found: _Found, source: Path) -> list[str]:
    """Return a warning for each file that a module names, that is in the module's folder, and that does not travel with
    the run."""
    spec = found.spec
    included = {path for index in range(len(spec.bundle.include)) for path in _included(spec, index)}
    return [
        f"{source.name} names {text!r}, a file in the same folder that does not travel with the run; add the file to "
        "bundle.include if the code reads it"
        for text in sorted(literal_files(source))
        if source.parent / text not in included and not text.endswith(".py")
    ]


def _add_included(found: _Found) -> None:
    spec = found.spec
    if spec.bundle.include and not spec.folder:
        raise SpecError(
            "bundle.include is relative to the spec's folder, but this spec has no folder; set the spec's key folder"
        )
    folder = Path(spec.folder)
    if spec.bundle.include and not folder.is_dir():
        return
    for index, pattern in enumerate(spec.bundle.include):
        name = f"bundle.include.{index}"
        paths = _included(spec, index)
        if not paths:
            raise SpecError(f"{name}: no file matches {pattern!r} in {spec.folder}; correct or remove it")
        for path in paths:
            found.add("include", name, f"folder/{_inside(name, path, folder)}", path)


def _included(spec: RunSpec, index: int) -> list[Path]:
    """Return the files that an entry of bundle.include names; for a folder, all files in it."""
    if not spec.folder:
        return []
    matches = sorted(Path(spec.folder).glob(spec.bundle.include[index]))
    return [file for path in matches for file in (_files_below(path) if path.is_dir() else [path])]


def _add_data(found: _Found, prepared: Mapping[str, Sequence[Path]] = NONE_PREPARED) -> None:
    spec = found.spec
    for field_name, paths in prepared.items():
        for index, path in enumerate(paths):
            found.add("data", field_name, path_of_prepared(field_name, index, path.name), path)
    for field_name, names in data_names(spec).items():
        if field_name in prepared:
            continue
        for name in filter(is_path, names):
            bundled = path_of_data(spec.folder, name)
            if glob.has_magic(name):
                folder, _ = split_glob(name)
                base = path_of_data_folder(spec.folder, folder)
                for path in map(Path, sorted(glob.glob(name, recursive=True))):
                    if path.is_file():
                        inside = _inside(field_name, path, Path(folder))
                        found.add("data", field_name, f"{base}/{inside}", path)
            elif os.path.isdir(name):
                for path in _files_below(Path(name)):
                    inside = _inside(field_name, path, Path(name))
                    found.add("data", field_name, f"{bundled}/{inside}", path)
            elif os.path.lexists(name):
                found.add("data", field_name, bundled, Path(name))


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden, in order. Links to folders count as files and are refused."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = sorted(set(folders) - set(links) - {"__pycache__"} - {n for n in folders if n.startswith(".")})
        yield from (Path(parent, name) for name in sorted([*names, *links]) if not name.startswith("."))


def _inside(name: str, path: Path, folder: Path) -> str:
    """Return the path below `folder`. Raises SpecError for a link that leaves the folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SpecError(
            f"{name}: {str(path)!r} is a link to {str(path.resolve())!r}, outside of {str(folder)!r}; put a copy of the file "
            "there instead of the link"
        )
    return path.relative_to(folder).as_posix()


def _checked_size(name: str, path: Path) -> int:
    """Return the size of a file in bytes. Raises SpecError if the path is not a readable file."""
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(name, path, error) from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
        raise SpecError(f"{name}: {str(path)!r} is {kind}, not a file; name a file")
    if not os.access(path, os.R_OK):
        raise SpecError(f"{name}: {str(path)!r} cannot be read: Permission denied; chmod u+r it")
    return status.st_size


def _unreadable(name: str, path: Path, error: OSError) -> SpecError:
    return SpecError(f"{name}: {str(path)!r} cannot be read: {error.strerror}; correct or remove it")


def _digested(bundled: str, kind: Kind, name: str, path: Path) -> BundledFile:
    """Return the manifest's entry for a file. Raises SpecError if the file cannot be read or is changed meanwhile."""
    try:
        with open_named(path) as source:
            sha256 = hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
            size = source.tell()
            if os.fstat(source.fileno()).st_size != size:
                raise SpecError(f"{name}: {str(path)!r} was changed while it was read; submit again")
    except OSError as error:
        raise _unreadable(name, path, error) from None
    return BundledFile(bundled, kind, size, sha256)


def collect_again(spec: RunSpec, before: Manifest | None) -> Bundle | None:
    """Return the bundle of a run's present files; None if this machine lacks files of code. Examples, prepared data and
    data that this machine lacks are kept from `before`, the earlier bundle if it is known. Raises SpecError."""
    code = {path_of_file(spec.folder, file): file for file in map(file_of, code_paths(spec).values())}
    had = {file.path for file in before.files if file.kind == "code"} if before is not None else set(code)
    if any(bundled in had and not os.path.isfile(file) for bundled, file in code.items()):
        return None
    is_prepared = spec.data.preparation.is_used
    if before is None:
        return None if is_prepared else collect(spec)
    data = {file.path for file in before.subset("data").files}
    if spec.samples and not is_prepared and data <= _paths_of_data(spec):
        return collect(spec)
    return collect(spec, data_of=before)


def _paths_of_data(spec: RunSpec) -> set[str]:
    found = _Found(spec)
    _add_data(found)
    return set(found.files)
