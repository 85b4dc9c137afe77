/**
 * A job's events as they are written: server-sent events over fetch, because EventSource cannot send a token.
 *
 * Responsible for staying connected: after a break it resumes after the last event that it read, with growing pauses. It
 * does not interpret the events: its caller fetches the job when one arrives.
 *
 * Source: HTML Living Standard, 9.2 Server-sent events (the fields of an event stream, Last-Event-ID).
 */

import { Refused, identity } from "./session.js";

const PAUSE_FIRST_MS = 500;
const PAUSE_MAX_MS = 15_000;

/**
 * Calls `hear.record()` for each record, `hear.state("live" | "away")` when that changes, and `hear.end()` at the end of the
 * job's tape. Returns a function that stops it.
 */
export function follow(path, hear) {
  const stopping = new AbortController();
  stay(path, hear, stopping.signal);
  return () => stopping.abort();
}

/** The records of an event stream that ends by itself. */
export async function read(path) {
  const answer = await fetch(path, { headers: identity(), cache: "no-store", credentials: "omit" });
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
  const records = [];
  for await (const { name, data } of events(answer.body)) if (name === "record") records.push(JSON.parse(data));
  return records;
}

async function stay(path, hear, signal) {
  let last = null;
  let pause = PAUSE_FIRST_MS;
  while (!signal.aborted) {
    try {
      const headers = { ...identity(), Accept: "text/event-stream", ...(last === null ? {} : { "Last-Event-ID": last }) };
      const answer = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
      if (!answer.ok) throw new Error(`the event stream answered ${answer.status}`);
      hear.state("live");
      for await (const event of events(answer.body)) {
        if (event.name === "end") {
          hear.end();
          return;
        }
        last = event.id ?? last;
        pause = PAUSE_FIRST_MS;
        if (event.name === "record") hear.record();
      }
    } catch {
      // Whatever broke the stream (the service restarts, a proxy gave up), try again later.
    }
    if (signal.aborted) return;
    hear.state("away");
    await rest(pause * (0.75 + 0.5 * Math.random()), signal);
    pause = Math.min(2 * pause, PAUSE_MAX_MS);
  }
}

/** The events of a byte stream: `{id, name, data}` each. Comments and unknown fields are skipped. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = {};
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r/);
    rest = lines.pop();
    for (const line of lines) {
      const [, field, content] = /^([^:]*):? ?(.*)$/.exec(line);
      if (line === "") {
        if (event.data !== undefined) yield { name: "message", ...event };
        event = {};
      } else if (field === "id") event.id = content;
      else if (field === "event") event.name = content;
      else if (field === "data") event.data = event.data === undefined ? content : `${event.data}\n${content}`;
    }
  }
}

function rest(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
