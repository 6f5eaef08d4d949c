/** Server-sent events out of a body, however it is cut into chunks. */

export interface SseEvent {
  id: string;
  event: string;
  data: string;
}

/** Comments, events without data and an incomplete last event are left out. */
export async function* readSse(body: ReadableStream<Uint8Array>): AsyncGenerator<SseEvent> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const event = parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (event) yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function parse(block: string): SseEvent | null {
  const event: SseEvent = { id: "", event: "", data: "" };
  let hasData = false;
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "id") event.id = value;
    else if (name === "event") event.event = value;
    else if (name === "data") {
      event.data += (hasData ? "\n" : "") + value;
      hasData = true;
    }
  }
  return hasData ? event : null;
}
