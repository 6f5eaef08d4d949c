/** The address behind "#": a chat, a new one, or the engine view. Reload and back keep working. */

import { batch, signal } from "@preact/signals";

export type Route = "chat" | "engine";

const CHAT = "#/chat/";

export const route = signal<Route>("chat");
/** The chat that is shown, or was before the engine; null: a new one. */
export const chatId = signal<string | null>(null);

function read(): void {
  const { hash } = location;
  batch(() => {
    route.value = hash === "#/engine" ? "engine" : "chat";
    if (route.value === "chat") chatId.value = hash.startsWith(CHAT) ? hash.slice(CHAT.length) : null;
  });
}

read();
addEventListener("hashchange", read);

export function show(to: Route): void {
  location.hash = hrefOf(to);
  read(); // the event fires later
}

export function showChat(id: string | null): void {
  chatId.value = id;
  show("chat");
}

/** Replace this chat's address: going back does not lead to the old one. */
export function moveTo(id: string | null): void {
  chatId.value = id;
  if (route.value === "chat") history.replaceState(null, "", hrefOf("chat"));
}

export function hrefOf(to: Route): string {
  if (to === "engine") return "#/engine";
  return chatId.value === null ? "#/" : CHAT + chatId.value;
}
