package main

import (
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestSoak_FailsIfGoroutinesGrow(t *testing.T) {
	hours := []float64{0.1, 0.2, 0.3, 0.4, 0.5}

	for name, test := range map[string]struct {
		values []float64
		grows  bool
	}{
		"constant":            {[]float64{1000, 1000, 1000, 1000, 1000}, false},
		"random":              {[]float64{1000, 1100, 900, 1100, 900}, false},
		"shrinks":             {[]float64{1400, 1300, 1200, 1100, 1000}, false},
		"grows slowly":        {[]float64{1000, 1001, 1002, 1003, 1004}, false},
		"grows":               {[]float64{1000, 1010, 1020, 1030, 1040}, true},
		"grows with outliers": {[]float64{1000, 1100, 1180, 1320, 1400}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := soak{hours: hours, quantities: []*quantity{{name: "goroutines", bound: 0.05, values: test.values}}}

			if err := s.print(io.Discard); test.grows {
				assert.ErrorContains(t, err, "goroutines: grows by")
			} else {
				assert.NoError(t, err)
			}
		})
	}
}
