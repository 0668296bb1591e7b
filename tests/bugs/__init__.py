"""Tables of planted bugs, one per room; `mutants.Bug` says what a row means."""

from bugs import bench, core, data, deploy, guard, memory, methods, model, norm, report, source, state

ROOMS = (core, state, model, norm, guard, memory, methods, data, source, bench, report, deploy)
ROWS = [row for room in ROOMS for row in room.ROWS]
