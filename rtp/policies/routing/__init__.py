"""Where a request goes: `score(query, candidates, predict) -> [R]`, highest wins.

Candidates are the ranks that could take the request now. Ties go to the chat's last rank, then to
the least loaded, then to the lowest id. A policy with a true attribute `holds` lets a request wait
for a busy rank that has its prefix, where that is predicted to be sooner (design section 4.5). One
with a true attribute `by_row`, whose score of a rank depends on that rank's row only, saves the
Master cutting the columns down: it sees all ranks, and its scores of the others are ignored. One
with a true attribute `monotone`, whose score of a rank never rises with more load there or less of
the prompt, is not shown ranks that an idle one excels. NaN, a wrong shape or an exception falls
back to the least predicted wait, is counted and shown.
"""
