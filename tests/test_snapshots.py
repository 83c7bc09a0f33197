"""Which URLs name a storage; what is sent there and fetched is tested with the run directories (`test_storage.py`)."""

import pytest

from empo2_jax.errors import ConfigError
from empo2_jax.snapshots import check_url


def test_unknown_storages_are_refused() -> None:
    with pytest.raises(ConfigError, match="'nowhere' is unknown; s3, gs and file"):
        check_url("nowhere://bucket/run")
    for url in ("bogus", "/bucket/run", "s3"):
        with pytest.raises(ConfigError, match=rf"^storage {url}: a URL with its scheme is allowed: s3://…, gs://…"):
            check_url(url)
    check_url("file:///bucket/run")
