// What happened to a Service: changes of endpoints, what its Pods' status says of their past, and Events.
import { useState } from "preact/hooks";
import { ago } from "./format";
import type { Detail, Moment } from "./types";

const sources: [Moment["from"], string][] = [
  ["endpoints", "Endpoints"],
  ["pods", "Pods"],
  ["events", "Events"],
];

/** when is the time of day, and the day if it is another. */
function when(time: string, now: number): string {
  const at = new Date(time);
  const clock = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date(now).toDateString() ? clock : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock}`;
}

export function Timeline({ detail, now }: { detail: Detail; now: number }) {
  const [hidden, setHidden] = useState<Set<string>>(new Set());
  const all = detail.timeline ?? [];
  const shown = all.filter((m) => !hidden.has(m.from));
  const toggle = (from: string) => {
    const next = new Set(hidden);
    if (!next.delete(from)) next.add(from);
    setHidden(next);
  };
  return (
    <>
      <div class="chips" role="group" aria-label="What to show">
        {sources.map(([from, name]) => (
          <button key={from} class="chip" aria-pressed={!hidden.has(from)} onClick={() => toggle(from)}>
            {name} <small>{all.filter((m) => m.from === from).length}</small>
          </button>
        ))}
      </div>
      <ol class="timeline" tabIndex={0} aria-label="What happened, the newest first">
        {shown.map((m) => (
          <li key={m.time + m.from + m.what + (m.reason ?? "")} class={m.kind}>
            <time dateTime={m.time} title={new Date(m.time).toLocaleString("en-GB")}>
              {when(m.time, now)}
            </time>{" "}
            <small class="since">{ago(m.time, now)} ago</small>
            <span>
              {m.reason && <b>{m.reason} </b>}
              {m.what} {m.count && m.count > 1 ? <small>({m.count} times)</small> : null}
            </span>
          </li>
        ))}
        {shown.length === 0 && <li class="neutral">Nothing happened that is known of.</li>}
      </ol>
      <p class="hint">
        {detail.since && !detail.since.startsWith("0001") ? `Changes of endpoints are noted since ${when(detail.since, now)}, when this session began to watch. ` : ""}
        {detail.hidden?.includes("Events") ? "You may not see Events of this namespace. " : ""}
        {detail.hidden?.includes("Pods") ? "You may not see Pods of this namespace." : ""}
      </p>
    </>
  );
}
