"""The commands of `tierkv token`: make, list and revoke the tokens that identify callers."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from msgspec.structs import replace

from tierkv.cli.output import json_option, print_json
from tierkv.errors import ConfigError
from tierkv.http.callers import (
    AuthFile,
    RoleName,
    TokenRow,
    changing,
    digest_of,
    new_token,
    read,
    write,
)

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,5})([mhd])")  # up to the year 4764: Python ends with 9999

_file = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    envvar="TIERKV_AUTH__FILE",
    required=True,
    show_envvar=True,
    help="The auth file, which nodes read as auth.file.",
)


@click.group()
def token() -> None:
    """Make, list and revoke the tokens of callers.

    The auth file holds only digests of tokens. Nodes read a changed file within a second.
    """


def _lifetime(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    del ctx, param
    if value is None:
        return None
    found = _DURATION.fullmatch(value)
    if found is None:
        raise click.BadParameter("give a number of minutes, hours or days, such as 30m, 12h or 90d")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


@token.command()
@_file
@click.option("--name", required=True, help="The name of the caller in logs.")
@click.option(
    "--role",
    type=click.Choice([role.value for role in RoleName]),
    required=True,
    help=(
        "The role: read sees the state; write also runs requests of its tenant; admin "
        "also operates the node."
    ),
)
@click.option(
    "--tenant",
    default="",
    help="The caller works with the blocks of this tenant.  [default: the node's own]",
)
@click.option(
    "--expires",
    callback=_lifetime,
    metavar="TIME",
    help="The token's lifetime, such as 30m, 12h or 90d.  [default: no end]",
)
@json_option
def new(
    path: Path,
    name: str,
    role: str,
    tenant: str,
    expires: timedelta | None,
    *,
    as_json: bool,
) -> None:
    """Make a token and print it. The token is not stored and cannot be printed again.

    If the auth file does not exist, it is created; only its owner can read it.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    text, token_id = new_token()
    row = TokenRow(
        id=token_id,
        name=name,
        role=RoleName(role),
        tenant=tenant,
        sha256=digest_of(text.encode()),
        created=now,
        expires=now + expires if expires is not None else None,
    )
    with changing(path):
        content = read(path) if path.exists() else AuthFile()
        write(path, replace(content, tokens=(*content.tokens, row)))
    if as_json:
        print_json({"token": text, **_readable(row)})
    else:
        click.echo(text)


@token.command(name="list")
@_file
@json_option
def list_tokens(path: Path, *, as_json: bool) -> None:
    """List the tokens of the auth file by id, role and name."""
    rows = [_readable(row) for row in read(path).tokens]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        until = f"until {row['expires']}" if row["expires"] else "for ever"
        tenant = f"tenant {row['tenant']}" if row["tenant"] else "the node's tenant"
        click.echo(f"{row['id']}  {row['role']:5}  {row['name']}  {tenant}  {until}")


@token.command()
@_file
@click.argument("which")
@json_option
def revoke(path: Path, which: str, *, as_json: bool) -> None:
    """Revoke the token with the id WHICH, or all tokens with the name WHICH."""
    with changing(path):
        content = read(path)
        kept = tuple(row for row in content.tokens if which not in (row.id, row.name))
        if len(kept) == len(content.tokens):
            raise ConfigError(
                f"{path} has no token with the id or name {which!r}: see `tierkv token list`"
            )
        write(path, replace(content, tokens=kept))
    count = len(content.tokens) - len(kept)
    if as_json:
        print_json({"revoked": count})
    else:
        click.echo(f"revoked {count}")


def _readable(row: TokenRow) -> dict[str, str | None]:
    return {
        "id": row.id,
        "name": row.name,
        "role": row.role.value,
        "tenant": row.tenant,
        "created": row.created.isoformat(),
        "expires": row.expires.isoformat() if row.expires else None,
    }
