// What the page says of what one points at, and of causes.

// What is said of a span, or of an idle time (ref below 0), line by line.
function wordsOf(header, entry, ref) {
  const time = (seconds) => formatTime(header, seconds);
  const where = (span) => `${token(header, entry, span)} on rank ${entry.ranks[entry.rank[span]]}`;
  if (ref < 0) {
    const gap = -1 - ref, cause = Object.keys(header.causes)[entry.gap_cause[gap]], span = entry.gap_span[gap];
    return [
      `idle for ${time(entry.gap_end[gap] - entry.gap_start[gap])}: ${causeIn(entry, cause)}`,
      ...(isUnexplained(entry, cause) ? [] : [header.cause_words[cause]]),
      `from ${fromTo(header, entry.gap_start[gap], entry.gap_end[gap])} on rank ${entry.ranks[entry.gap_rank[gap]]}`,
      ...(span >= 0 ? [`${cause === "end" ? "until the end of" : "for"} ${where(span)}`] : []),
    ];
  }
  const kind = header.kinds[entry.kind[ref]], lines = [];
  const what = kind === "OVERLAP_F_B" ? "a forward and a backward together" : (header.names[kind] ?? kind);
  lines.push(`${token(header, entry, ref)}: ${what}, ${time(entry.end[ref] - entry.start[ref])}`);
  lines.push(`from ${fromTo(header, entry.start[ref], entry.end[ref])} on rank ${entry.ranks[entry.rank[ref]]}, lane ${entry.lanes[entry.lane[ref]].name}`);
  const last = lastWait(entry, ref);
  if (last >= 0) lines.push(`waited last for ${where(last)}, until ${time(entry.end[last])}`);
  const other = counterpart(header, entry, ref);
  if (other === NOWHERE) lines.push(`${header.timelines[1 - entry.number].label} has no such action on this lane`);
  if (other >= 0) {
    const theirs = header.timelines[1 - entry.number];
    const own = entry.end[ref] - entry.start[ref], length = theirs.end[other] - theirs.start[other];
    const change = length > 0 ? `, here ${signed((100 * (own - length)) / length)}%` : "";
    lines.push(`${theirs.label}: ${time(length)} from ${time(theirs.start[other])}${change}`);
    const before = otherBefore(header, entry, ref);
    if (before) lines.push(`there ${before}`);
  }
  for (const finding of entry.findings) if (finding.span === ref) lines.push(`${finding.severity}: ${finding.rule}: ${finding.what}`);
  return lines;
}

// What is said of a rank's memory at a time.
function memoryWordsOf(header, { entry, rank, name }, time) {
  const { lo, hi } = entry.samples[rank], peak = peakOf(entry, rank);
  let at = -1;
  for (let i = lo; i < hi && entry.memory_time[i] <= time; i++) at = i;
  const now = at < 0 ? 0 : entry.memory_bytes[at];
  const during = peak.span >= 0 ? ` during ${token(header, entry, peak.span)}` : "";
  const lines = [
    `rank ${name} holds ${formatHeld(header, now)} at ${formatTime(header, time)}`,
    `at most ${formatHeld(header, peak.bytes)}${during}, at ${formatTime(header, peak.time)}`,
  ];
  const held = at < 0 ? [] : entry.memory_parts.filter((part) => part.bytes[at] > 0);
  if (held.length) lines.splice(1, 0, `now ${held.map((part) => `${part.name} ${formatBytes(part.bytes[at])}`).join(", ")}`);
  const parts = Object.entries(entry.components[rank] ?? {}).filter(([, bytes]) => bytes > 0);
  if (parts.length) lines.push(`then ${parts.map(([part, bytes]) => `${part} ${formatBytes(bytes)}`).join(", ")}`);
  if (entry.capacity_bytes) lines.push(`usable: ${formatBytes(entry.capacity_bytes)}`);
  return lines;
}

// What a simulated step leaves to other replicas of its ranks, no recording explains.
function causeIn(entry, cause) {
  return isUnexplained(entry, cause) ? "not explained" : cause;
}

function isUnexplained(entry, cause) {
  return cause === "replicas" && entry.source === "measured";
}

function signed(number) {
  return `${number >= 0 ? "+" : ""}${number.toFixed(1)}`;
}
