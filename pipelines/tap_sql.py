"""SQL over a tap's rows by DuckDB: nothing is read from files or the network, nothing is kept.

Rule 1: what DuckDB refuses is a person's mistake, said in one line.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import duckdb
import pyarrow as pa

from schemas.topics import KINDS
from workers.runtime.errors import BadInput

_OFFLINE = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false", "threads": "1"}


def named_topics(sql: str) -> list[str]:
    """Topics that a query speaks of; `dead_letters` is `dead-letters`."""
    return [kind for kind in KINDS if re.search(rf"(?<!\w){kind.replace('-', '[-_]')}(?!\w)", sql)]


def query(sql: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """The query's rows. BadInput."""
    with _connection("--sql") as connection:
        for name, table in tables.items():
            connection.register(name, table)
            if "-" in name:
                connection.register(name.replace("-", "_"), table)
        connection.execute("set enable_external_access = false")
        found = connection.sql(sql)
        if found is None:
            raise BadInput("--sql: this gives no rows; write a query, e.g. select count(*) from trajectories")
        return found.to_arrow_table()


class Where:
    """An SQL condition on rows of one kind. BadInput if there is no such condition."""

    def __init__(self, kind: str, condition: str, schema: pa.Schema) -> None:
        self._kind, self._condition = kind, condition
        self.places(schema.empty_table())

    def places(self, rows: pa.Table) -> list[int]:
        """Which rows it holds for, in their order. BadInput if it cannot be asked of one of them."""
        with _connection("--where") as connection:
            numbered = rows.append_column("_place", pa.array(range(rows.num_rows), pa.int64()))
            connection.register("rows_of_the_tap", numbered)
            connection.execute("set enable_external_access = false")
            found = connection.sql(f"select _place from rows_of_the_tap where ({self._condition}\n) order by _place")
            return [int(place) for (place,) in found.fetchall()]


@contextmanager
def _connection(option: str) -> Iterator["duckdb.DuckDBPyConnection"]:
    with duckdb.connect(":memory:", config=_OFFLINE) as connection:
        try:
            yield connection
        except duckdb.Error as error:
            raise BadInput(f"{option}: {_one_line(str(error))}") from error


def _one_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip(" ^") and not line.startswith("LINE ")]
    words = " ".join(lines)
    reserved = [word for word in ("group", "index") if re.search(rf"\b{word}\b", said, re.I)]
    if "Parser Error" in words and reserved:
        words += f' (words of SQL need quotes as columns: "{reserved[0]}")'
    return words
