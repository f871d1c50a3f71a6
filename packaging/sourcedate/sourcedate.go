// Package sourcedate says when what is packaged is said to be made: at the time of its sources. It never asks a clock.
package sourcedate

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

// variable is standard: https://reproducible-builds.org/specs/source-date-epoch/.
const variable = "SOURCE_DATE_EPOCH"

// FromEnvironment reads SOURCE_DATE_EPOCH, in seconds since 1970, which make sets to the time of the commit.
func FromEnvironment() (time.Time, error) {
	seconds, err := strconv.ParseInt(os.Getenv(variable), 10, 64)
	if err != nil || seconds < 0 {
		return time.Time{}, fmt.Errorf("environment variable %s: %q is no number of seconds since 1970; without a git checkout, set it", variable, os.Getenv(variable))
	}

	return time.Unix(seconds, 0).UTC(), nil
}
