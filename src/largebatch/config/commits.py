"""The commits of the repositories on the hub that a config names, at which a run reads them from its start to its end.

They are kept by name: "user/model", or "datasets/user/data@v2".
"""

from collections.abc import Mapping
from typing import TypeVar

from largebatch.config.data import Mixable
from largebatch.config.recipe import RecipeConfig
from largebatch.config.sections import Section
from largebatch.system.repositories import RepositoryKind, commit_of, find

Config = TypeVar("Config", bound=RecipeConfig)
AnySection = TypeVar("AnySection", bound=Section)


def find_commits(config: RecipeConfig, known: Mapping[str, str]) -> dict[str, str]:
    """The commit of each repository that a config names, those that are `known` as they are.

    Raises:
        UserError: One cannot be found.
    """
    found: dict[str, str] = {}
    sections: list[tuple[str, Section]] = [("data", each) for each in config.data.sections().values() or [config.data]]
    for where, section in [*sections, ("model", config.model)]:
        for field, kind in section.hub_fields.items():
            name = getattr(section, field)
            key = _key(name, kind)
            place = find(name, f"{where}.{field}")
            if place.revision is not None and key not in found:
                found[key] = known.get(key) or commit_of(place, kind, f"{where}.{field}")
    return found


def at_commits(config: Config, commits: Mapping[str, str]) -> Config:
    """The config, with each name of a repository as ID@COMMIT."""
    data = _named(config.data, config.data, commits)
    if isinstance(data, Mixable) and data.sources:
        sections = data.sections()
        named = [_named(source, sections[source.name], commits) for source in data.sources]
        data = data.model_copy(update={"sources": named})
    return config.model_copy(update={"data": data, "model": _named(config.model, config.model, commits)})


def _named(section: AnySection, kinds: Section, commits: Mapping[str, str]) -> AnySection:
    """A section, or a source of a mixture, which has some of the fields of its `kinds`."""
    named = {}
    for field, kind in kinds.hub_fields.items():
        name = getattr(section, field, None)
        if name and (commit := commits.get(_key(name, kind))):
            named[field] = f"{name.partition('@')[0]}@{commit}"
    return section.model_copy(update=named)


def _key(name: str, kind: RepositoryKind) -> str:
    return f"datasets/{name}" if kind == "dataset" else name
