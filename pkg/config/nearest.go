package config

import "strings"

// nearest is the word that was probably meant; empty if none is close.
func nearest(word string, words []string) string {
	const longest = 40
	if len(word) > longest {
		return ""
	}

	best, distance := "", len(word)/3+1

	for _, candidate := range words {
		if d := editDistance(strings.ToLower(word), strings.ToLower(candidate)); d <= distance && (best == "" || d < distance) {
			best, distance = candidate, d
		}
	}

	return best
}

// editDistance is Levenshtein's: how many bytes to insert, delete or replace.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}

	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1

		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}

			diagonal = row[j+1]
			row[j+1] = min(replaced, diagonal+1, row[j]+1)
		}
	}

	return row[len(b)]
}
