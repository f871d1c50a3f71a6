package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// samples are a process's metrics in Prometheus' text format.
type samples string

// sum adds up the series of a name. Labels, if any, are those that a series must have, such as `method="PATCH"`.
func (s samples) sum(name string, labels ...string) float64 {
	var total float64

	for line := range strings.Lines(string(s)) {
		rest, found := strings.CutPrefix(strings.TrimSpace(line), name)
		if !found || (rest[:1] != "{" && rest[:1] != " ") || !containsAll(rest, labels) {
			continue
		}

		if value, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64); err == nil {
			total += value
		}
	}

	return total
}

// approvals is how many certificate requests talos-ccm has approved.
func (s samples) approvals() float64 { return s.sum("talosccm_csr_approval_count", `status="approve"`) }

func containsAll(text string, parts []string) bool {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return false
		}
	}

	return true
}

// memory is how much of the computer's memory a process occupies, in bytes.
type memory struct{ resident, highest int64 }

// errNoMemory is of a process whose status tells nothing of memory: process exited.
var errNoMemory = errors.New("process exited")

func readMemory(pid int) (memory, error) {
	file, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return memory{}, fmt.Errorf("read the memory of process %d: %w", pid, err)
	}
	defer file.Close() //nolint:errcheck // only read

	var m memory

	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		key, value, _ := strings.Cut(scanner.Text(), ":")
		number, _, _ := strings.Cut(strings.TrimSpace(value), " kB")

		switch kilobytes, _ := strconv.ParseInt(number, 10, 64); key {
		case "VmRSS":
			m.resident = kilobytes << 10
		case "VmHWM":
			m.highest = kilobytes << 10
		}
	}

	if m.resident == 0 {
		return memory{}, fmt.Errorf("read the memory of process %d: %w", pid, errNoMemory)
	}

	return m, nil
}
