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
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/component-base/logs"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/ccm"
)

// asCommand makes the test binary run the command, since some flags exit the process.
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

// command runs the command with only environ as its environment.
func command(t *testing.T, environ []string, args ...string) outcome {
	t.Helper()

	self, err := os.Executable()
	require.NoError(t, err)

	var stdout, stderr bytes.Buffer

	cmd := exec.CommandContext(t.Context(), self, args...)
	// By default the race detector delays the exit by a second, and coverage prints a warning to stderr.
	cmd.Env = append(slices.Clone(environ), asCommand+"=yes", "GORACE=atexit_sleep_ms=0", "GOCOVERDIR="+t.TempDir())
	cmd.Stdout, cmd.Stderr = &stdout, &stderr

	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}

	return outcome{code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
}

// execute runs cmd within the test as the root command does.
func execute(t *testing.T, cmd *cobra.Command, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()

	var out, errOut bytes.Buffer

	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)

	err = cmd.ExecuteContext(t.Context())

	return out.String(), errOut.String(), err
}

func assertContains(t *testing.T, text string, parts ...string) {
	t.Helper()

	for _, part := range parts {
		assert.Contains(t, text, part)
	}
}

// requireError fails the test unless the error mentions all texts, or there is none if they are empty.
func requireError(t *testing.T, err error, mentions ...string) {
	t.Helper()

	if strings.Join(mentions, "") == "" {
		require.NoError(t, err)
	}

	for _, mention := range mentions {
		if mention != "" {
			require.ErrorContains(t, err, mention)
		}
	}
}

// Commands that read standard input are interruptible.
func TestCommands_EndOnSignal(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)

	for _, args := range [][]string{{"config", "validate", "-"}, {"render", "--machine=-"}} {
		cmd := exec.CommandContext(t.Context(), self, args...)
		cmd.Env = []string{asCommand + "=yes"}

		input, err := cmd.StdinPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())

		// More than the pipe buffer: when the write returns, the command reads.
		_, err = input.Write(bytes.Repeat([]byte("# nothing\n"), 20_000))
		require.NoError(t, err)
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))

		var exit *exec.ExitError
		assert.True(t, errors.As(cmd.Wait(), &exit))
		assert.Nil(t, t.Context().Err())
	}
}

func TestLog_OmitsGRPCMessages(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)

	cmd := exec.CommandContext(t.Context(), self, "--machine-socket="+filepath.Join(t.TempDir(), "absent"), "--run-dir="+t.TempDir(), "-v=2")
	cmd.Env = []string{asCommand + "=yes"}

	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())

	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})

	failed := 0

	for lines := bufio.NewScanner(stderr); failed < 4 && lines.Scan(); {
		require.NotContains(t, lines.Text(), "addrConn")

		if strings.Contains(lines.Text(), "no such file or directory") {
			failed++
		}
	}

	assert.NotEqual(t, 0, failed, "log does not report the missing socket")
}

type flagValues struct {
	name    string
	elect   bool
	workers int
	timeout time.Duration
	list    []string
}

func settingsFlags(s *flagValues) *pflag.FlagSet {
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags.StringVar(&s.name, "cluster-name", "default", "")
	flags.BoolVar(&s.elect, "leader-elect", true, "")
	flags.IntVar(&s.workers, "concurrent-node-syncs", 1, "")
	flags.DurationVar(&s.timeout, "timeout", time.Second, "")
	flags.StringSliceVar(&s.list, "controllers", []string{"*"}, "")

	return flags
}

func TestSetFromEnvironment(t *testing.T) {
	for _, test := range []struct {
		name          string
		args, environ []string
		want          func(*flagValues) // changes the defaults
		// mentions are parts of the error; empty if there is none.
		mentions []string
	}{
		{name: "empty environment"},
		{name: "variable sets flag", environ: []string{"TALOS_CCM_CLUSTER_NAME=prod"}, want: func(s *flagValues) { s.name = "prod" }},
		{name: "bool, int and duration", environ: []string{"TALOS_CCM_LEADER_ELECT=false", "TALOS_CCM_CONCURRENT_NODE_SYNCS=7", "TALOS_CCM_TIMEOUT=2m"}, want: func(s *flagValues) {
			s.elect, s.workers, s.timeout = false, 7, 2*time.Minute
		}},
		{name: "list", environ: []string{"TALOS_CCM_CONTROLLERS=cloud-node,service"}, want: func(s *flagValues) { s.list = []string{"cloud-node", "service"} }},
		{name: "value with equals sign", environ: []string{"TALOS_CCM_CLUSTER_NAME=a=b=c"}, want: func(s *flagValues) { s.name = "a=b=c" }},
		{name: "empty value", environ: []string{"TALOS_CCM_CLUSTER_NAME="}, want: func(s *flagValues) { s.name = "" }},
		{name: "command line takes precedence", args: []string{"--cluster-name=shop"}, environ: []string{"TALOS_CCM_CLUSTER_NAME=prod"}, want: func(s *flagValues) { s.name = "shop" }},
		{name: "command line with the default value", args: []string{"--leader-elect=true"}, environ: []string{"TALOS_CCM_LEADER_ELECT=false"}},
		{name: "invalid value, overridden", args: []string{"--concurrent-node-syncs=2"}, environ: []string{"TALOS_CCM_CONCURRENT_NODE_SYNCS=many"}, want: func(s *flagValues) { s.workers = 2 }},
		{name: "other variables are ignored", environ: []string{"PATH=/bin", "TALOS_VERSION=1.13", "CLUSTER_NAME=x", "XTALOS_CCM_CLUSTER_NAME=x", "odd", ""}},

		{name: "variables of a Service named talos-ccm", environ: []string{
			"TALOS_CCM_SERVICE_HOST=10.96.0.7", "TALOS_CCM_SERVICE_PORT=443", "TALOS_CCM_PORT=tcp://10.96.0.7:443", "TALOS_CCM_PORT_443_TCP_ADDR=10.96.0.7",
		}},

		{name: "unknown flag", environ: []string{"TALOS_CCM_CLUSTERNAME=prod"}, mentions: []string{"TALOS_CCM_CLUSTERNAME", "no such flag"}},
		{name: "lower case name", environ: []string{"TALOS_CCM_cluster_name=prod"}, mentions: []string{"TALOS_CCM_cluster_name", "no such flag"}},
		{name: "prefix without name", environ: []string{"TALOS_CCM_=x"}, mentions: []string{"TALOS_CCM_", "no such flag"}},
		{name: "invalid value", environ: []string{"TALOS_CCM_CONCURRENT_NODE_SYNCS=many"}, mentions: []string{"TALOS_CCM_CONCURRENT_NODE_SYNCS", "many"}},
		{name: "empty value for a bool", environ: []string{"TALOS_CCM_LEADER_ELECT="}, mentions: []string{"TALOS_CCM_LEADER_ELECT"}},
		{name: "all errors are reported", environ: []string{"TALOS_CCM_X=1", "TALOS_CCM_TIMEOUT=soon", "TALOS_CCM_CLUSTER_NAME=prod"}, mentions: []string{"TALOS_CCM_X", "TALOS_CCM_TIMEOUT", "soon"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got flagValues

			flags := settingsFlags(&got)
			require.NoError(t, flags.Parse(test.args))

			err := setFromEnvironment(flags, test.environ)
			requireError(t, err, test.mentions...)

			// After an error the command exits, so the flag values do not matter.
			if err == nil {
				want := flagValues{name: "default", elect: true, workers: 1, timeout: time.Second, list: []string{"*"}}
				if test.want != nil {
					test.want(&want)
				}

				assert.Equal(t, want, got)
			}
		})
	}
}

func FuzzSetFromEnvironment(f *testing.F) {
	f.Add("TALOS_CCM_CLUSTER_NAME=prod")
	f.Add("TALOS_CCM_TIMEOUT=-1h")
	f.Add("TALOS_CCM_CONTROLLERS=\"")
	f.Add("TALOS_CCM_\x00=\xff")

	f.Fuzz(func(t *testing.T, entry string) {
		var s flagValues

		err := setFromEnvironment(settingsFlags(&s), []string{entry})

		variable, _, _ := strings.Cut(entry, "=")
		if err != nil {
			assert.ErrorContains(t, err, variable)
		}
	})
}

func TestHelp_OmitsFlagsWithoutEffect(t *testing.T) {
	got := command(t, nil, "--help-all")

	for _, flag := range []string{
		"--cloud-provider", "--cluster-name", "--concurrent-service-syncs", "--configure-cloud-routes", "--enable-leader-migration",
		"--node-status-update-frequency", "Leader-migration flags", "Service-lb-controller flags",
	} {
		assert.NotContains(t, got.stdout, flag)
	}

	accepted := []string{"--cloud-provider=external", "--cluster-name=prod", "--configure-cloud-routes=false", "--enable-leader-migration=false", "--node-status-update-frequency=1m"}
	assert.NoError(t, checkEnvironment(append(accepted, "--machine-socket=/absent", "--run-dir=/absent"), nil))
}

// The reference has a table row for each flag in the output of --help. --help-all lists more.
func TestHelp_ListsFlagsOfReference(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/flags.md")
	require.NoError(t, err)

	flags := func(text, pattern string) (names []string) {
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			names = append(names, match[1])
		}

		slices.Sort(names)

		return names
	}

	help := command(t, nil, "--help")
	require.Equal(t, 0, help.code)
	require.Empty(t, help.stderr)
	assertContains(t, help.stdout, "--v ", "cloud-node-controller", "TALOS_CCM_", "--help-all")

	listed := flags(help.stdout, `(?m)^ {2,6}(?:-\w, )?--([a-z0-9-]+)`)
	assert.Equal(t, flags(string(page), "(?m)^\\| `--([a-z0-9-]+)` "), listed)

	all := flags(command(t, nil, "--help-all").stdout, `(?m)^ {2,6}(?:-\w, )?--([a-z0-9-]+)`)
	assert.LessOrEqual(t, len(listed), 30)
	assert.GreaterOrEqual(t, len(all), 60)
	assert.Subset(t, all, listed)
}

func TestFlags_HaveDefaultsOfReference(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/flags.md")
	require.NoError(t, err)

	options, err := ccm.NewOptions()
	require.NoError(t, err)

	flags := newCommand(options, logs.NewOptions()).Flags()
	rows := regexp.MustCompile("(?m)^\\| `--([a-z0-9-]+)` \\| (?:in the (service spec)|`(.+?)`) \\|").FindAllStringSubmatch(string(page), -1)
	assert.GreaterOrEqual(t, len(rows), 10)

	for _, row := range rows {
		if row[2] != "" {
			assert.Contains(t, string(extension.Spec), "    - --"+row[1])
		} else {
			assert.Equal(t, row[3], flags.Lookup(row[1]).DefValue, row[1])
		}
	}
}

func TestHelp_DescribesFlags(t *testing.T) {
	assertContains(t, strings.Join(strings.Fields(command(t, nil, "--help-all").stdout), " "),
		"If empty, the pod subnets of the Talos configuration are used.", "Requires node-ipam-controller in --controllers.", "'RangeAllocator' (", "'CloudAllocator' (",
		"global.providerIDFallback in the configuration takes precedence.", "open file limit", "(default [/healthz,/readyz])")
}

func TestHelp_FitsIn100Columns(t *testing.T) {
	for _, args := range [][]string{{}, {"config"}, {"config", "init"}, {"config", "validate"}, {"config", "schema"}, {"render"}, {"diff"}, {"version"}} {
		for line := range strings.Lines(command(t, nil, append(args, "--help")...).stdout) {
			if isCommand := strings.HasPrefix(line, "  for kind in "); !isCommand { // to copy
				assert.LessOrEqual(t, utf8.RuneCountInString(strings.TrimRight(line, "\n")), 100, line)
			}
		}
	}
}

func TestHelp_OfCommandOmitsVersionFlag(t *testing.T) {
	for _, name := range []string{"render", "config", "version", "completion"} {
		got := command(t, nil, name, "--help")
		assert.Equal(t, 0, got.code)
		assert.NotContains(t, got.stdout, "--version")

		got = command(t, nil, name, "--version")
		assert.Equal(t, 1, got.code)
		assert.Contains(t, got.stderr, "unknown flag: --version")
	}
}

func TestVersion_IsPrinted(t *testing.T) {
	const detailed = `^talos-ccm v\d+\.\d+\.\d+\S* \((commit \w+, )?go\d\S+, linux/\w+\)\n$`

	for _, test := range []struct {
		name, arg string
		environ   []string
		want      string // regular expression for stdout
	}{
		{"flag", "--version", nil, `^talos-ccm v\d+\.\d+\.\d+\S*\n$`},
		{"command", "version", nil, detailed},
		{"command with invalid environment", "version", []string{"TALOS_CCM_BIND_ADDRESS=none"}, detailed},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := command(t, test.environ, test.arg)
			assert.Equal(t, 0, got.code)
			assert.Empty(t, got.stderr)
			assert.Regexp(t, test.want, got.stdout)
		})
	}
}

func TestCommand_RefusesInvalidFlags(t *testing.T) {
	absent := filepath.Join(t.TempDir(), "absent")
	outside := func(more ...string) []string {
		return append([]string{"--talosconfig=" + absent, "--kubeconfig=" + absent}, more...)
	}

	for _, test := range []struct {
		name          string
		environ, args []string
		mentions      []string
	}{
		{"no flags", nil, nil, []string{"--machine-socket", "--talosconfig", "runs as a Talos system extension", "talos-ccm render --node"}},
		{"no flags but an unknown controller", nil, []string{"--controllers=foo"}, []string{"--machine-socket", `unknown controller "foo"`}},
		{"socket and talosconfig", nil, outside("--machine-socket=" + absent), []string{"exactly one of --machine-socket and --talosconfig"}},
		{"outside Talos without kubeconfig", nil, []string{"--talosconfig=" + absent, "--run-dir=" + absent}, []string{"--kubeconfig", "KUBERNETES_SERVICE_HOST"}},
		{"socket without run directory", nil, []string{"--machine-socket=" + absent}, []string{"requires --run-dir"}},
		{"unknown fallback", nil, outside("--provider-id-fallback=hostname"), []string{"--provider-id-fallback", `"hostname"`, `"uuid"`, `"node-ip"`}},
		{"unknown controller", nil, outside("--controllers=*,node-ipam"), []string{`unknown controller "node-ipam"; supported controllers: `, "nodeipam"}},
		{"unknown flag", nil, []string{"--colors"}, []string{"unknown flag: --colors"}},
		{"unknown flag of a command", nil, []string{"render", "--confg=x"}, []string{"unknown flag: --confg"}},
		{"argument", nil, []string{"start"}, []string{`unknown command "start" for "talos-ccm"`}},
		{"similar command", nil, []string{"rendr"}, []string{`unknown command "rendr" for "talos-ccm"; did you mean render?`}},
		{"similar subcommand", nil, []string{"config", "validte"}, []string{`unknown command "validte" for "talos-ccm config"; did you mean validate?`}},
		{"similar shell", nil, []string{"completion", "fisch"}, []string{`unknown command "fisch" for "talos-ccm completion"; did you mean fish?`}},
		{"unknown variable", []string{"TALOS_CCM_MACHINESOCKET=x"}, nil, []string{"TALOS_CCM_MACHINESOCKET"}},
		{"invalid environment", []string{"TALOS_CCM_MACHINE_SOCKET=" + absent}, nil, []string{"requires --run-dir"}},
		{"unknown log format", nil, outside("--logging-format=xml"), []string{"xml"}},
		{"missing kubeconfig", nil, outside(), []string{"kubeconfig", absent}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := command(t, test.environ, test.args...)
			assert.Equal(t, 1, got.code)
			assert.Regexp(t, `(?m)^Error: `, got.stderr) // below the log
			assertContains(t, got.stderr, test.mentions...)
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
		"TALOS_CCM_HELP_ALL=true":        "TALOS_CCM_HELP_ALL",
		"TALOS_CCM_CONTROLERS=*":         "TALOS_CCM_CONTROLERS: no such flag",
		"TALOS_CCM_TALOSCONFIG=/absent":  "--talosconfig",
		"TALOS_CCM_CLUSTER_CIDR=nowhere": "nowhere",

		"TALOS_CCM_CONCURRENT_NODE_SYNCS=0":          "--concurrent-node-syncs: must be positive, not 0",
		"TALOS_CCM_CONCURRENT_NODE_SYNCS=-1":         "--concurrent-node-syncs: must be positive, not -1",
		"TALOS_CCM_CONTROLLERS=":                     "--controllers: enables no controller",
		"TALOS_CCM_CONTROLLERS=*,nodeipam":           "requires --allocate-node-cidrs",
		"TALOS_CCM_ALLOCATE_NODE_CIDRS=true":         "requires node-ipam-controller",
		"TALOS_CCM_LEADER_ELECT_RESOURCE_NAME=other": "must be cloud-controller-manager-talos",
	} {
		requireError(t, checkEnvironment(args, []string{variable}), mention)
	}

	both := []string{"TALOS_CCM_CONTROLLERS=*,nodeipam", "TALOS_CCM_ALLOCATE_NODE_CIDRS=true"}
	require.NoError(t, checkEnvironment(args, both))
}

func TestCompletion_OffersCommandsAndFlagsWithEffect(t *testing.T) {
	for _, shell := range []string{"bash", "fish", "zsh", "powershell"} {
		got := command(t, nil, "completion", shell)
		assert.Equal(t, 0, got.code)
		assert.Contains(t, got.stdout, "talos-ccm")
	}

	got := command(t, nil, "__complete", "--cl")
	assert.Contains(t, got.stdout, "--cluster-cidr")
	assert.NotContains(t, got.stdout, "--cluster-name")
}

// A full disk must not look like success.
func TestCommand_FailsIfOutputCannotBeWritten(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = full.Close() })

	self, err := os.Executable()
	require.NoError(t, err)

	for _, args := range [][]string{
		{"--help"},
		{"--help-all"},
		{"--version"},
		{"version"},
		{"config"},
		{"diff", "--help"},
		{"config", "validate", "testdata/config/good-rules.yaml"},
		{"render", "--machine", recorded},
	} {
		var stderr bytes.Buffer

		cmd := exec.CommandContext(t.Context(), self, args...)
		cmd.Env, cmd.Stdout, cmd.Stderr = []string{asCommand + "=yes"}, full, &stderr

		assert.Error(t, cmd.Run(), "%v", args)
		assert.Equal(t, 1, strings.Count(stderr.String(), "no space left on device"), "%v: %s", args, stderr.String())
	}
}

func TestCommand_CompletesValuesRatherThanFiles(t *testing.T) {
	const noFiles = ":4\n"

	for want, args := range map[string][]string{
		"text\njson\n" + noFiles:                 {"config", "validate", "-o", ""},
		"table\nyaml\njson\nmachine\n" + noFiles: {"render", "--output", ""},
		"uuid\nnode-ip\n" + noFiles:              {"diff", "--provider-id-fallback", ""},
		noFiles:                                  {"diff", ""},
		":0\n":                                   {"config", "validate", ""},
	} {
		assert.Equal(t, want, command(t, nil, append([]string{"__complete"}, args...)...).stdout)
	}
}
