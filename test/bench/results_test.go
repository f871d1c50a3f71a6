package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestResults_ComparesWithFile(t *testing.T) {
	measured := func(cpu, goroutines float64) results {
		return results{
			{"CPU time to initialize", talosCCM}: {9, cpu - 1, cpu + 1, 0}, {"CPU time to initialize", readsAndWrites}: {2},
			{"initialize all Nodes", talosCCM}: {4}, {"initialize all Nodes", readsAndWrites}: {3},
			{"requests to Talos per Node", talosCCM}: {8}, {"writes per Node", talosCCM}: {4},
			{"heap per machine", talosCCM}: {90}, {"goroutines per machine", talosCCM}: {goroutines},
		}
	}
	file := filepath.Join(t.TempDir(), "result.json")
	require.NoError(t, measured(3, 8).update(file, 200))

	committed, err := readCommitted(file, 200)
	require.NoError(t, err)

	assert.NoError(t, measured(3, 8).compare(committed))
	assert.NoError(t, measured(2, 7).compare(committed), "better")
	assert.ErrorContains(t, measured(4, 8).compare(committed), "CPU time to initialize: 2.00 is not between 0 and 1.8")
	assert.ErrorContains(t, measured(3, 9).compare(committed), "goroutines per machine: 9.00 is not between 0 and 8.40")
	assert.ErrorContains(t, results{}.compare(committed), "writes per Node: 0.00 is not")
	assert.ErrorContains(t, measured(3, 8).compare(nil), "goroutines per machine")

	_, err = readCommitted(file, 100)
	assert.ErrorContains(t, err, "has results with 200 machines")

	require.NoError(t, os.WriteFile(file, []byte("{"), 0o600))

	_, err = readCommitted(file, 200)
	assert.ErrorContains(t, err, "parse "+file)
}

func TestResults_PrintsRatios(t *testing.T) {
	r := results{
		{"initialize all Nodes", talosCCM}: {5, 4, 3}, {"initialize all Nodes", writesOnly}: {2},
		{"assign dual-stack pod CIDRs", talosCCM}: {1.5}, {"assign dual-stack pod CIDRs", kubeControllerManager}: {1},
	}

	var out bytes.Buffer
	r.print(&out, 100, []string{talosCCM, writesOnly, kubeControllerManager})

	assert.Contains(t, out.String(), "| talos-ccm | writes only |\n")
	assert.Contains(t, out.String(), "| initialize all Nodes | ≤ 1.3, 1.6 times | 4.0 s | 2.0 s (2.00) |\n")
	assert.Contains(t, out.String(), "| 1.5 s | 1.0 s (1.50) |\n")
}
