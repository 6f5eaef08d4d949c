"""The public JSON Schema test suite against grammars; not collected, `make json-suite` runs it.

The argument is the source archive of PyPI's jsonschema, which has the suite. A schema is refused by
name or followed: no instance that its tests call invalid is accepted. Valid ones may be left out
where a grammar writes a subset (LEFT_OUT, by the suite's file).
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections import Counter

from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.core.sampling import Grammar
from streamer.errors import InvalidRequest

FILES = re.compile(r"json/tests/draft2020-12/((?:optional/format/)?[\w-]+)\.json$")
# Keys in the schema's order; numbers as it writes them; formats followed where JSON Schema itself
# lets them mean nothing; rare forms of addresses; leap seconds.
LEFT_OUT = {"allOf": 2, "const": 5, "enum": 4, "type": 1, "format": 10} | {
    f"optional/format/{name}": count
    for name, count in (("email", 4), ("ipv6", 4), ("time", 6), ("date-time", 2))
}


def main(path: str) -> int:
    tokens = [bytes([i]) for i in range(256)]
    grammars = Grammars(
        Vocabulary(tokens, {256: b"<end>"}, (256,), lambda text: list(text.encode()))
    )
    refused, wrong, left_out = Counter[str](), list[str](), Counter[str]()
    followed = agreed = 0
    with tarfile.open(path) as archive:
        for member in archive:
            match, file = FILES.search(member.name), archive.extractfile(member)
            for group in json.load(file) if match and file else []:
                try:
                    compiled = grammars.compile(Grammar("json", json.dumps(group["schema"])))
                except InvalidRequest as error:
                    refused[error.message.partition(": ")[2][:60]] += 1
                    continue
                followed += 1
                for test in group["tests"]:
                    matcher = compiled.matcher()
                    text = json.dumps(test["data"], ensure_ascii=False).encode()
                    is_whole = matcher.try_consume_tokens(list(text)) == len(text)
                    is_accepted = is_whole and matcher.is_accepting()
                    agreed += is_accepted == test["valid"]
                    if is_accepted and not test["valid"]:
                        wrong.append(f"{group['description']}: {test['description']}")
                    if test["valid"] and not is_accepted:
                        left_out[match[1] if match else ""] += 1
    print(f"schemas: {followed} followed, {sum(refused.values())} refused; tests: {agreed} agree,")
    print(f"{sum(left_out.values())} valid instances are never written, {len(wrong)} wrong")
    print(*(f"  {count:4} {reason}" for reason, count in refused.most_common()), sep="\n")
    print(*wrong, sep="\n")
    more = {name: n for name, n in left_out.items() if n > LEFT_OUT.get(name, 0)}
    print(f"left out beyond what is known: {more}" if more else "nothing else is left out")
    return 1 if wrong or more or not followed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
