"""What tells a model what it is, or what to do: no rule moves it, whatever stands in it.

Words of several languages, which are of orders, bans, limits and conditions. Knows too many rather than too few: of a
value that is taken for an instruction a prompt costs more, of an instruction that is taken for a value its weight.
"""

from __future__ import annotations

import re

_ORDERS = (
    r"you(?:'re|r (?:task|job|role|name|goal)| \w+)"
    r"|always|must|should|shall|can|could|would|only|answer|reply|respond|speak|write|use|keep"
    r"|ignore|refuse|reveal|tell|say|act|pretend|behave|follow|obey|avoid|ensure|make sure|remember|treat|ask"
    r"|assistant|persona|please|if|when|while|unless|allow(?:ed|s)?|forbidden|prohibited|banned|required|to be"
    r"|du bist|sie sind|immer|muss|musst|darf|darfst|soll(?:st|en|te)?|antworte\w*|sprich|verrate|verwende|benutze"
    r"|bleibe?|bitte|wenn|falls|verboten|erlaubt|assistent\w*|tu es|vous êtes|toujours|dois|doit|devez|réponds|répondez"
    r"|eres|usted es|siempre|debes?|responde\w*|asistente|devi|deve|rispondi|sempre|você é|responda|je bent|u bent"
    r"|altijd|moet|mag|antwoord|du är|alltid|måste|får|ska|svara|jesteś|zawsze|musisz|wolno|odpowiadaj"
    r"|olet|aina|vastaa|pitää|ты|вы|всегда|должен|должна|можно|нельзя|отвечай\w*"
)
_BANS = (
    r"no(?=\s+\w)|not|\w+n't|cannot|none|nothing|nobody|never|without|nie|niemals|nicht|nichts|niemand\w*|keine?[nmrs]?"
    r"|ohne|jamais|pas|sans|aucune?|rien|nunca|nada|nadie|sin|non|senza|niente|nessuno|não|sem|nooit|niet|geen"
    r"|zonder|aldrig|inte|ingen|inga|inget|utan|ikke|uten|uden|nigdy|bez|żadn\w+|koskaan|älä|älkää|ei|ilman"
    r"|никогда|не|нет|без|ніколи|немає|ne|nikdy|nem|ne|soha|asla|değil"
)
_LIMITS = (
    r"(?:at|the) (?:most|least|latest|earliest)|up to|max(?:imum|imal\w*|(?=\W{1,3}\d))|min(?:imum|imal\w*)|limit\w*"
    r"|than|below|above|under|over|beyond|before|after|until|(?-i:till)|between|within|during"
    r"|past(?=\s+\d)|every|each|(?-i:per\s+[a-z]+)|daily|deadline|höchstens|mindestens|spätestens|frühestens|bis|unter|über|vor|nach|zwischen"
    r"|jede\w?|täglich|au (?:plus|moins)|jusqu['’]\w+|avant|après|entre|chaque|máxim[oa]|mínim[oa]|hasta|antes|después"
    r"|cada|(?:al )?massimo|minimo|fino a|prima|dopo|ogni|até|depois|hoogstens|maximaal|minstens|minimaal|tot|voor"
    r"|tussen|elke|högst|minst|senast|före|efter|mellan|varje|høyst|højst|etter|maks\w*|najwyżej|najmniej|przed|każd\w+"
    r"|enintään|vähintään|korkeintaan|ennen|jälkeen|joka|максимум|минимум|не более|до|после|между|каждый"
    r"|legfeljebb|legalább|nejvýše|maximálně|nejméně|en (?:fazla|az|çok)|το πολύ|έως"
)
_SCRIPTS = (
    r"あなた|ください|必ず|禁止|您|你|请|請|不|必须|必須|勿|别|別|最多|最大|最少|至多|至少|以内|以內|以下|以上|まで|なし|ない"
    r"|ません|하지|마세요|최대|최소|이하|이상|이내|까지|금지|반드시"
)
_IMPERATIVE = (
    r"(?:^|[:=.,;!?(]\s*|[-*•]\s+)(?:stay|be|call|let|break|dim|save|waste|open|close|turn|set|put|take|give|make|go|stop"
    r"|start|switch|play|whisper|shout|cook|leave|help|check|wait|read|return|list|show|explain|talk|greet|address"
    r"|refer|mention|count|add|include|exclude|warn|sing|wear|eat|drink|bring|send|wake|lock|unlock)"
    r"\s+[^\W\d_]"
)
"""At the beginning of a sentence, or behind a label, with what is to be done it to."""

INSTRUCTION = re.compile(
    rf"\b(?:{_ORDERS}|{_BANS}|{_LIMITS})\b|(?-i:\bmay\s+[a-z])|{_IMPERATIVE}|\bdo\s+(?:not|always|n[o']t)\b|{_SCRIPTS}",
    re.IGNORECASE,
)
