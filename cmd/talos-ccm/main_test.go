package main

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// asCommand has this binary be the command itself: some flags end the process.
const asCommand = "BE_TALOS_CCM"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) == "" {
		os.Exit(m.Run())
	}

	main()
}

type outcome struct {
	code           int
	stdout, stderr string
}

// command runs the command with an environment of environ alone.
func command(t *testing.T, environ []string, args ...string) outcome {
	t.Helper()

	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}

	var stdout, stderr bytes.Buffer

	cmd := exec.CommandContext(t.Context(), self, args...)
	// The race detector waits for a second before a process ends, and coverage warns on stderr, unless told otherwise.
	cmd.Env = append(slices.Clone(environ), asCommand+"=yes", "GORACE=atexit_sleep_ms=0", "GOCOVERDIR="+t.TempDir())
	cmd.Stdout, cmd.Stderr = &stdout, &stderr

	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}

	return outcome{code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
}

// What only reads does not outlive a Ctrl-C, whatever it reads from.
func TestCommands_EndOnSignal(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}

	for _, args := range [][]string{{"config", "validate", "-"}, {"render", "--machine=-"}} {
		cmd := exec.CommandContext(t.Context(), self, args...)
		cmd.Env = []string{asCommand + "=yes"}

		input, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}

		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}

		// More than a pipe holds: once it is written, the command reads.
		if _, err := input.Write(bytes.Repeat([]byte("# nothing\n"), 20_000)); err != nil {
			t.Fatal(err)
		}

		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}

		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || t.Context().Err() != nil {
			t.Errorf("%v: it ended with: %v", args, err)
		}
	}
}

func TestLog_OmitsGRPCMessages(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}

	cmd := exec.CommandContext(t.Context(), self, "--machine-socket="+filepath.Join(t.TempDir(), "absent"), "--run-dir="+t.TempDir(), "-v=2")
	cmd.Env = []string{asCommand + "=yes"}

	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}

	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})

	failed := 0

	for lines := bufio.NewScanner(stderr); failed < 4 && lines.Scan(); {
		if strings.Contains(lines.Text(), "addrConn") {
			t.Fatal(lines.Text())
		}

		if strings.Contains(lines.Text(), "no such file or directory") {
			failed++
		}
	}

	if failed == 0 {
		t.Error("it did not say that there is no socket")
	}
}

type settings struct {
	name    string
	elect   bool
	workers int
	timeout time.Duration
	list    []string
}

func settingsFlags(s *settings) *pflag.FlagSet {
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags.StringVar(&s.name, "cluster-name", "default", "")
	flags.BoolVar(&s.elect, "leader-elect", true, "")
	flags.IntVar(&s.workers, "concurrent-node-syncs", 1, "")
	flags.DurationVar(&s.timeout, "timeout", time.Second, "")
	flags.StringSliceVar(&s.list, "controllers", []string{"*"}, "")

	return flags
}

func TestSetFromEnvironment(t *testing.T) {
	defaults := func(change func(*settings)) settings {
		s := settings{name: "default", elect: true, workers: 1, timeout: time.Second, list: []string{"*"}}
		change(&s)

		return s
	}
	unchanged := defaults(func(*settings) {})

	for _, test := range []struct {
		rule    string
		args    []string
		environ []string
		want    settings
		// mentions are what the error says; none: no error.
		mentions []string
	}{
		{rule: "nothing set, nothing changed", want: unchanged},
		{rule: "a variable sets its flag", environ: []string{"TALOS_CCM_CLUSTER_NAME=prod"}, want: defaults(func(s *settings) { s.name = "prod" })},
		{rule: "of every type", environ: []string{"TALOS_CCM_LEADER_ELECT=false", "TALOS_CCM_CONCURRENT_NODE_SYNCS=7", "TALOS_CCM_TIMEOUT=2m"}, want: defaults(func(s *settings) {
			s.elect, s.workers, s.timeout = false, 7, 2*time.Minute
		})},
		{rule: "a list too", environ: []string{"TALOS_CCM_CONTROLLERS=cloud-node,service"}, want: defaults(func(s *settings) { s.list = []string{"cloud-node", "service"} })},
		{rule: "a value may contain an equals sign", environ: []string{"TALOS_CCM_CLUSTER_NAME=a=b=c"}, want: defaults(func(s *settings) { s.name = "a=b=c" })},
		{rule: "a value may be empty", environ: []string{"TALOS_CCM_CLUSTER_NAME="}, want: defaults(func(s *settings) { s.name = "" })},
		{rule: "the command line wins", args: []string{"--cluster-name=shop"}, environ: []string{"TALOS_CCM_CLUSTER_NAME=prod"}, want: defaults(func(s *settings) { s.name = "shop" })},
		{rule: "even with the default", args: []string{"--leader-elect=true"}, environ: []string{"TALOS_CCM_LEADER_ELECT=false"}, want: unchanged},
		{rule: "even over nonsense", args: []string{"--concurrent-node-syncs=2"}, environ: []string{"TALOS_CCM_CONCURRENT_NODE_SYNCS=many"}, want: defaults(func(s *settings) { s.workers = 2 })},
		{rule: "other variables are none of our business", environ: []string{"PATH=/bin", "TALOS_VERSION=1.13", "CLUSTER_NAME=x", "XTALOS_CCM_CLUSTER_NAME=x", "odd", ""}, want: unchanged},

		{
			rule:    "what a kubelet tells containers of a Service named talos-ccm is none of our business",
			environ: []string{"TALOS_CCM_SERVICE_HOST=10.96.0.7", "TALOS_CCM_SERVICE_PORT=443", "TALOS_CCM_PORT=tcp://10.96.0.7:443", "TALOS_CCM_PORT_443_TCP_ADDR=10.96.0.7"}, want: unchanged,
		},

		{rule: "a variable without a flag is an error", environ: []string{"TALOS_CCM_CLUSTERNAME=prod"}, mentions: []string{"TALOS_CCM_CLUSTERNAME", "no such flag"}},
		{rule: "names are in upper case", environ: []string{"TALOS_CCM_cluster_name=prod"}, mentions: []string{"TALOS_CCM_cluster_name", "no such flag"}},
		{rule: "the prefix alone names no flag", environ: []string{"TALOS_CCM_=x"}, mentions: []string{"TALOS_CCM_", "no such flag"}},
		{rule: "a bad value is an error that names variable and value", environ: []string{"TALOS_CCM_CONCURRENT_NODE_SYNCS=many"}, mentions: []string{"TALOS_CCM_CONCURRENT_NODE_SYNCS", "many"}},
		{rule: "an empty value is bad where there is no empty one", environ: []string{"TALOS_CCM_LEADER_ELECT="}, mentions: []string{"TALOS_CCM_LEADER_ELECT"}},
		{
			rule: "all errors are told at once", environ: []string{"TALOS_CCM_X=1", "TALOS_CCM_TIMEOUT=soon", "TALOS_CCM_CLUSTER_NAME=prod"},
			mentions: []string{"TALOS_CCM_X", "TALOS_CCM_TIMEOUT", "soon"},
		},
	} {
		t.Run(test.rule, func(t *testing.T) {
			var got settings

			flags := settingsFlags(&got)
			if err := flags.Parse(test.args); err != nil {
				t.Fatal(err)
			}

			err := setFromEnvironment(flags, test.environ)
			if (err != nil) != (len(test.mentions) > 0) {
				t.Fatalf("got error %v", err)
			}

			for _, mention := range test.mentions {
				if !strings.Contains(err.Error(), mention) {
					t.Errorf("%q does not mention %s", err, mention)
				}
			}

			// With an error the command ends, and what pflag leaves behind a bad value does not matter.
			if err == nil && !equal(got, test.want) {
				t.Errorf("got  %+v\nwant %+v", got, test.want)
			}
		})
	}
}

func equal(a, b settings) bool {
	return a.name == b.name && a.elect == b.elect && a.workers == b.workers && a.timeout == b.timeout && slices.Equal(a.list, b.list)
}

func FuzzSetFromEnvironment(f *testing.F) {
	f.Add("TALOS_CCM_CLUSTER_NAME=prod")
	f.Add("TALOS_CCM_TIMEOUT=-1h")
	f.Add("TALOS_CCM_CONTROLLERS=\"")
	f.Add("TALOS_CCM_\x00=\xff")

	f.Fuzz(func(t *testing.T, entry string) {
		var s settings

		err := setFromEnvironment(settingsFlags(&s), []string{entry})

		variable, _, _ := strings.Cut(entry, "=")
		if err != nil && !strings.Contains(err.Error(), variable) {
			t.Errorf("%q does not mention %q", err, variable)
		}
	})
}

// The flags that an operator of this command, or of the upstream Talos CCM, looks for.
func TestHelp_ListsFlags(t *testing.T) {
	got := command(t, nil, "--help")
	if got.code != 0 || got.stderr != "" {
		t.Fatalf("exit code %d, stderr %q", got.code, got.stderr)
	}

	for _, part := range []string{
		"--machine-socket", "--talosconfig", "--run-dir", "--drop-privileges", "--provider-id-fallback",
		"--kubeconfig", "--leader-elect", "--controllers", "--secure-port", "--concurrent-node-syncs", "--version", "--v ",
		"cloud-node-controller", "TALOS_CCM_",
	} {
		if !strings.Contains(got.stdout, part) {
			t.Errorf("the help does not mention %s", part)
		}
	}
}

func TestVersion_IsPrinted(t *testing.T) {
	for _, test := range []struct {
		rule, want string // a regular expression
		environ    []string
		args       []string
	}{
		{rule: "by flag", args: []string{"--version"}, want: `^talos-ccm v\d+\.\d+\.\d+\S*\n$`},
		{rule: "by command", args: []string{"version"}, want: `^talos-ccm v\d+\.\d+\.\d+\S*\n$`},
		{rule: "whatever the environment", environ: []string{"TALOS_CCM_BIND_ADDRESS=none"}, args: []string{"version"}, want: `^talos-ccm v\d+\.\d+\.\d+\S*\n$`},
	} {
		t.Run(test.rule, func(t *testing.T) {
			if got := command(t, test.environ, test.args...); got.code != 0 || got.stderr != "" || !regexp.MustCompile(test.want).MatchString(got.stdout) {
				t.Errorf("got %+v, want %s", got, test.want)
			}
		})
	}
}

func TestCommand_RefusesInvalidFlags(t *testing.T) {
	absent := filepath.Join(t.TempDir(), "absent")
	outside := func(more ...string) []string {
		return append([]string{"--talosconfig=" + absent, "--kubeconfig=" + absent}, more...)
	}

	for _, test := range []struct {
		rule          string
		environ, args []string
		mentions      []string
	}{
		{"nothing at all", nil, nil, []string{"--machine-socket", "--talosconfig"}},
		{"both sources of the machine's word", nil, outside("--machine-socket=" + absent), []string{"exactly one of --machine-socket and --talosconfig"}},
		{"outside Talos without Kubernetes", nil, []string{"--talosconfig=" + absent, "--run-dir=" + absent}, []string{"--kubeconfig", "KUBERNETES_SERVICE_HOST"}},
		{"inside Talos without a place for credentials", nil, []string{"--machine-socket=" + absent}, []string{"requires --run-dir"}},
		{"an unknown fallback", nil, outside("--provider-id-fallback=hostname"), []string{"--provider-id-fallback", `"hostname"`, `"uuid"`, `"node-ip"`}},
		{"an unknown controller", nil, outside("--controllers=cloud-nodes"), []string{"cloud-nodes"}},
		{"an unknown flag", nil, []string{"--machinesocket=" + absent}, []string{"--machinesocket"}},
		{"an argument", nil, []string{"start"}, []string{"start"}},
		{"an unknown variable", []string{"TALOS_CCM_MACHINESOCKET=x"}, nil, []string{"TALOS_CCM_MACHINESOCKET"}},
		{"the environment is checked like the command line", []string{"TALOS_CCM_MACHINE_SOCKET=" + absent}, nil, []string{"requires --run-dir"}},
		{"an unknown log format", nil, outside("--logging-format=xml"), []string{"xml"}},
		{"a kubeconfig that is not there", nil, outside(), []string{"kubeconfig", absent}},
	} {
		t.Run(test.rule, func(t *testing.T) {
			got := command(t, test.environ, test.args...)
			if got.code != 1 {
				t.Errorf("exit code %d", got.code)
			}

			if !strings.HasPrefix(lastLines(got.stderr), "Error: ") {
				t.Errorf("stderr does not end in an error: %q", got.stderr)
			}

			for _, mention := range test.mentions {
				if !strings.Contains(got.stderr, mention) {
					t.Errorf("%q does not mention %s", got.stderr, mention)
				}
			}
		})
	}
}

func TestCheckEnvironment_RefusesInvalidVariables(t *testing.T) {
	args := []string{"--machine-socket=/absent", "--run-dir=" + t.TempDir()}

	for variable, mention := range map[string]string{
		"TALOS_CCM_V=4":                  "",
		"TALOS_CCM_NO_SUCH_FLAG=1":       "TALOS_CCM_NO_SUCH_FLAG",
		"TALOS_CCM_V=loud":               "loud",
		"TALOS_CCM_CONTROLLERS=cloud":    "cloud",
		"TALOS_CCM_LOGGING_FORMAT=xml":   "xml",
		"TALOS_CCM_VERSION=true":         "TALOS_CCM_VERSION",
		"TALOS_CCM_TALOSCONFIG=/absent":  "--talosconfig",
		"TALOS_CCM_CLUSTER_CIDR=nowhere": "nowhere",
	} {
		err := checkEnvironment(args, []string{variable})
		if (err == nil) != (mention == "") || err != nil && !strings.Contains(err.Error(), mention) {
			t.Errorf("%s: got %v, want %q", variable, err, mention)
		}
	}
}

// lastLines is what the command says in the end, without the log before it.
func lastLines(stderr string) string {
	if at := strings.LastIndex(stderr, "Error: "); at == 0 || (at > 0 && stderr[at-1] == '\n') {
		return stderr[at:]
	}

	return stderr
}
