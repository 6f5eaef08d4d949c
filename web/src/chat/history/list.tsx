/** The history in the sidebar: search, and to each chat a name, export and delete. */

import { signal } from "@preact/signals";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Dots, Download, Search, Upload } from "../../ui/icons.tsx";
import { Dialog } from "../../ui/dialog.tsx";
import type { Conversation } from "../conversation/conversation.ts";
import { found, hit, openFound, query } from "./search.ts";
import { exportChats, importChats } from "./history.ts";
import { isKept } from "./database.ts";
import { conversations, current, remove, rename } from "../conversation/store.ts";

const toDelete = signal<Conversation | null>(null);
const isDeleteOpen = signal(false);
const fault = signal("");

export function HistoryList({ onOpen }: { onOpen: () => void }) {
  const look = (text: string) => {
    query.value = text;
    hit.value = null;
  };
  const openFirst = () => {
    if (query.value.trim() && found.value[0]) openFound(found.value[0]), onOpen();
  };
  if (conversations.value.length === 0) return <p class="side-note">Your chats will be stored here, in this browser.</p>;
  return (
    <>
      <div class="search">
        <Search />
        <label class="sr" for="search">
          Search chats
        </label>
        <input id="search" type="search" placeholder="Search chats" autocomplete="off" value={query.value} onInput={(e) => look(e.currentTarget.value)} onKeyDown={(e) => e.key === "Enter" && openFirst()} />
      </div>
      {found.value.length === 0 && <p class="side-note">No chat contains these words.</p>}
      <ul class="history">
        {found.value.map((conversation) => (
          <Entry key={conversation.id} conversation={conversation} onOpen={onOpen} />
        ))}
      </ul>
    </>
  );
}

function Entry({ conversation, onOpen }: { conversation: Conversation; onOpen: () => void }) {
  const [isMenuOpen, setMenuOpen] = useState(false);
  const [isRenaming, setRenaming] = useState(false);
  const title = conversation.title.value;
  const ask = () => {
    toDelete.value = conversation;
    isDeleteOpen.value = true;
  };
  if (isRenaming) return <Rename conversation={conversation} onDone={() => (setRenaming(false), setMenuOpen(false))} />;
  return (
    <li class="entry">
      <button class="side-link" type="button" aria-current={conversation === current.value || undefined} onClick={() => (openFound(conversation), onOpen())}>
        <span class="clip">{title}</span>
        {conversation.isLive.value && <span class="live-dot" role="img" aria-label="answering" />}
      </button>
      <button class="button action" type="button" aria-label={`More actions for ${title}`} aria-expanded={isMenuOpen} onClick={() => setMenuOpen(!isMenuOpen)}>
        <Dots />
      </button>
      {isMenuOpen && (
        <div class="entry-menu" role="group" aria-label={`Actions for ${title}`}>
          <button class="button small" type="button" onClick={() => setRenaming(true)}>
            Rename
          </button>
          <button class="button small" type="button" onClick={() => exportChats([conversation])}>
            Export
          </button>
          <button class="button small" type="button" aria-haspopup="dialog" onClick={ask}>
            Delete
          </button>
        </div>
      )}
    </li>
  );
}

function Rename({ conversation, onDone }: { conversation: Conversation; onDone: () => void }) {
  const field = useRef<HTMLInputElement>(null);
  useLayoutEffect(() => field.current?.select(), []);
  const save = (event: Event) => {
    event.preventDefault();
    rename(conversation, field.current?.value ?? "");
    onDone();
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    onDone();
  };
  return (
    <li class="entry">
      <form class="rename" onSubmit={save}>
        <label class="sr" for="rename">
          Chat name
        </label>
        <input id="rename" ref={field} type="text" maxLength={80} autocomplete="off" defaultValue={conversation.title.value} onKeyDown={onKey} />
        <button class="button small" type="submit">
          Save
        </button>
      </form>
    </li>
  );
}

/** Below the history: whether it is stored; import and export. */
export function Transfer() {
  const file = useRef<HTMLInputElement>(null);
  const take = async () => {
    const chosen = file.current?.files?.[0];
    if (chosen) fault.value = await importChats(chosen);
    if (file.current) file.current.value = "";
  };
  return (
    <div class="transfer">
      <div class="fault" role="status">
        {!isKept.value && "This browser does not store your chats: they will be lost when you close this page. Export any that you need."}
      </div>
      <input ref={file} class="sr" type="file" accept=".json,application/json" tabIndex={-1} aria-label="Chat file" onChange={() => void take()} />
      <button class="button small" type="button" onClick={() => file.current?.click()}>
        <Upload /> Import
      </button>
      <button class="button small" type="button" disabled={conversations.value.length === 0} onClick={() => exportChats(conversations.value)}>
        <Download /> Export all
      </button>
      <div class="fault" role="alert">
        {fault}
      </div>
    </div>
  );
}

export function DeleteDialog() {
  const remove_ = (event: Event) => {
    event.preventDefault();
    isDeleteOpen.value = false;
    if (toDelete.value) remove(toDelete.value);
  };
  return (
    <Dialog title="Delete this chat?" open={isDeleteOpen} onClose={() => document.getElementById("prompt")?.focus()}>
      <form onSubmit={remove_}>
        <p class="clip">{toDelete.value?.title}</p>
        <div class="row">
          <button class="button" type="button" onClick={() => (isDeleteOpen.value = false)}>
            Cancel
          </button>
          <button class="button danger" type="submit">
            Delete
          </button>
        </div>
      </form>
    </Dialog>
  );
}
