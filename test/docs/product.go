package docs

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// product describes the commands, flags and variables of talos-ccm.
type product struct {
	binary string
	// commands has the flags of each subcommand; "" is talos-ccm itself.
	commands  map[string]flags
	variables map[string]bool
}

var flagLine = regexp.MustCompile(`(?m)^\s+(?:-(\w), )?--([a-z][a-z0-9-]*)( [A-Za-z]\S*)?`)

// askProduct parses the help texts of talos-ccm.
func askProduct(ctx context.Context, binary string) (product, error) {
	p := product{binary: binary, commands: map[string]flags{}, variables: map[string]bool{}}

	for _, command := range []string{"", "config", "config validate", "config schema", "render", "diff", "version", "completion bash"} {
		help, err := exec.CommandContext(ctx, binary, append(strings.Fields(command), cmp.Or(helpFlags[command], "--help"))...).Output()
		if err != nil {
			return product{}, fmt.Errorf("get help of talos-ccm %s: %w", command, err)
		}

		p.commands[command] = flags{"-h": "", "--help": ""}

		for _, match := range flagLine.FindAllStringSubmatch(string(help), -1) {
			short, long, value := match[1], match[2], match[3]

			kind := ""
			if value != "" && !strings.Contains(value, "[=") {
				kind = takesValue
			}

			p.commands[command]["--"+long] = kind

			if short != "" {
				p.commands[command]["-"+short] = kind
			}

			if command == "" {
				p.variables["TALOS_CCM_"+strings.ToUpper(strings.ReplaceAll(long, "-", "_"))] = true
			}
		}

		maps.Copy(p.commands[command], files[command])
	}

	return p, nil
}

// helpFlags has the flags that list all flags of a command, other than --help.
var helpFlags = map[string]string{"": "--help-all"}

// files has the flags and arguments of talos-ccm that name input files.
var files = map[string]flags{
	"config validate": flagList("<"),
	"render":          flagList("--config< --machine< --talosconfig<"),
	"diff":            flagList("--config< --talosconfig<"),
}

// tool returns talos-ccm as a tool.
func (p product) tool() tool { return tool{commands: p.commands} }

// accepts returns an error if talos-ccm rejects environ or args. Without a kubeconfig it exits after it has validated its flags.
func (p product) accepts(environ []string, args ...string) error {
	const nowhere = "/nonexistent/kubeconfig"

	cmd := exec.Command(p.binary, append(slices.Clone(args), "--talosconfig="+nowhere, "--kubeconfig="+nowhere)...)
	cmd.Env = append(slices.Clone(environ), "PATH=")

	out, err := cmd.CombinedOutput()
	if err == nil || strings.Contains(string(out), "read kubeconfig: stat "+nowhere) {
		return nil
	}

	return errors.New(strings.TrimSpace(string(out)))
}

// runTimeout bounds a command.
const runTimeout = time.Minute

// run runs a shell command in folder, with talos-ccm in the PATH.
func (p product) run(ctx context.Context, folder, line string) error {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()

	bin := filepath.Join(folder, ".bin")
	if err := os.MkdirAll(bin, 0o700); err != nil {
		return err
	}

	binary, err := filepath.Abs(p.binary)
	if err != nil {
		return err
	}

	if err := os.Symlink(binary, filepath.Join(bin, "talos-ccm")); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}

	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", line)
	cmd.Dir = folder
	cmd.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH")}

	var stderr bytes.Buffer

	cmd.Stderr = &stderr

	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}

	return nil
}
