/** Asks for the API key where the server requires one; open until the server has accepted it. */

import { effect, signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Dialog } from "../ui/dialog.tsx";
import { connection, useKey } from "./connection.ts";

const isOpen = signal(false);
const fault = signal("");

effect(() => {
  const state = connection.value;
  if (state.name === "locked") {
    fault.value = state.reason === "invalid" ? "The server did not accept that key." : "";
    isOpen.value = true;
  } else if (state.name === "connected") {
    isOpen.value = false;
  } else if (state.name === "reconnecting") {
    // visible only if the dialog is open
    fault.value = "The server does not respond. Trying again.";
  }
});

export function askForKey(): void {
  fault.value = "";
  isOpen.value = true;
}

export function KeyDialog({ onClose }: { onClose: () => void }) {
  const field = useRef<HTMLInputElement>(null);
  const message = fault.value;
  useEffect(() => field.current?.select(), [message]);
  const submit = (event: Event) => {
    event.preventDefault();
    const key = field.current?.value.trim();
    fault.value = "";
    if (key) useKey(key);
  };
  const closed = () => {
    if (field.current) field.current.value = "";
    onClose();
  };
  return (
    <Dialog title="This server requires an API key" open={isOpen} onClose={closed}>
      <form onSubmit={submit}>
        <div class="field">
          <label for="key">API key</label>
          <input ref={field} id="key" type="password" autocomplete="off" autocapitalize="off" spellcheck={false} required />
          <div class="fault" role="alert">
            {fault}
          </div>
          <small>Stored only in this tab, until it is closed.</small>
        </div>
        <div class="row">
          <button class="button" type="button" onClick={() => (isOpen.value = false)}>
            Not now
          </button>
          <button class="button primary" type="submit">
            Connect
          </button>
        </div>
      </form>
    </Dialog>
  );
}
