"""What has to be said beside the tables of a study or of runs: missing runs, other code, seen test rewards."""

import json

from empo2_jax.study.results import Results


def remarks(results: Results) -> list[str]:
    """All that is to be known of a study before its numbers are believed."""
    found = [f"Missing: {reason}" for reason in results.failed]
    if len(results.commits) > 1:
        found.append(f"Runs of {len(results.commits)} commits are compared: {', '.join(results.commits)}.")
    if dirty := [commit for commit in results.commits if commit.endswith("-dirty")]:
        found.append(f"Code that was changed after its commit: {', '.join(dirty)}.")
    if len({row["problems"] for row in results.rows if "problems" in row}) > 1:
        found.append("Not all runs played the same problems: the data changed between them.")
    return found + shared(results) + continued(results) + tried(results)


def shared(results: Results) -> list[str]:
    """Which arms are one experiment under several names."""
    known: dict[tuple[str, bool], list[str]] = {}
    for name in results.names:
        adapted = any("adaptation" in row for row in results.of(name))
        known.setdefault((json.dumps(results.arms[name]["config"], sort_keys=True), adapted), []).append(name)
    return [
        f"{', '.join(names)} are one configuration, and their runs the same." for names in known.values() if names[1:]
    ]


def continued(results: Results) -> list[str]:
    """Which runs were begun by the code of other commits than the one that ended them."""
    found = []
    for row in results.rows:
        if earlier := row.get("earlier_commits"):
            name = f"{row['arm']}, seed {row['seed']}" if len(results.of(row["arm"])) > 1 else row["arm"]
            found.append(f"{name} was begun by other code and continued: {earlier}.")
    return found


def tried(results: Results) -> list[str]:
    """What has to be said of scores that are no evaluation of a trained policy."""
    return [f"{name}: the score is that of its last trial, which has seen test rewards." for name in results.tried]
