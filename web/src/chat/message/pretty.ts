/** JSON with line breaks and indents, as far as it has come: what follows never moves what is there. */

export function pretty(json: string): string {
  let out = "";
  let depth = 0;
  let isText = false;
  let isEscaped = false;
  let isFresh = false; // after an opening bracket
  const line = () => `\n${"  ".repeat(depth)}`;
  for (const char of json) {
    if (isText) {
      out += char;
      if (isEscaped) isEscaped = false;
      else if (char === "\\") isEscaped = true;
      else if (char === '"') isText = false;
      continue;
    }
    if (/\s/.test(char)) continue;
    const isClosing = char === "}" || char === "]";
    if (isClosing) {
      depth = Math.max(0, depth - 1);
      if (!isFresh) out += line();
    } else if (isFresh) out += line();
    isFresh = char === "{" || char === "[";
    out += char;
    if (isFresh) depth += 1;
    else if (char === ",") out += line();
    else if (char === ":") out += " ";
    else if (char === '"') isText = true;
  }
  return out;
}
